"""VAR by its published names: random weights, and decoding in plain loops without a cache.

Float64, one image at a time: each forward pass processes all scales so far, with an explicit mask.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from tests.families.ldm_layout import ldm_shapes
from tests.families.official_layout import CLASSES, HEADS, VOCABULARY, WIDTH, fill
from tests.families.parallel_layout import State, by_blocks, doubled

LABELS = CLASSES["classes"]
SIDES, LATENTS, PIXELS = (1, 2, 3, 4), 6, (32, 32)
#: Token of a place, given its logits [V] under guidance.
Choose = Callable[[int, Tensor], int]


def var_state(
    seed: int = 0,
    layers: int = 2,
    shared: bool = False,
    normalised: bool = True,
    sides: Sequence[int] = SIDES,
) -> State:
    places = sum(side**2 for side in sides)
    shapes: dict[str, tuple[int, ...]] = {
        "word_embed.weight": (WIDTH, LATENTS),
        "word_embed.bias": (WIDTH,),
        "class_emb.weight": (LABELS + 1, WIDTH),
        "pos_start": (1, sides[0] ** 2, WIDTH),
        "pos_1LC": (1, places, WIDTH),
        "lvl_embed.weight": (len(sides), WIDTH),
        "head_nm.ada_lin.1.weight": (2 * WIDTH, WIDTH),
        "head_nm.ada_lin.1.bias": (2 * WIDTH,),
        "head.weight": (VOCABULARY, WIDTH),
        "head.bias": (VOCABULARY,),
    }
    if shared:
        shapes |= {"shared_ada_lin.1.weight": (6 * WIDTH, WIDTH), "shared_ada_lin.1.bias": (6 * WIDTH,)}
    for block in (f"blocks.{index}." for index in range(layers)):
        if shared:
            shapes[block + "ada_gss"] = (1, 1, 6, WIDTH)
        else:
            shapes |= {block + "ada_lin.1.weight": (6 * WIDTH, WIDTH), block + "ada_lin.1.bias": (6 * WIDTH,)}
        if normalised:
            shapes[block + "attn.scale_mul_1H11"] = (1, HEADS, 1, 1)
        shapes[block + "attn.mat_qkv.weight"] = (3 * WIDTH, WIDTH)
        for name in ("q_bias", "zero_k_bias", "v_bias"):
            shapes[f"{block}attn.{name}"] = (WIDTH,)
        for name, (out, width) in {
            "attn.proj": (WIDTH, WIDTH),
            "ffn.fc1": (4 * WIDTH, WIDTH),
            "ffn.fc2": (WIDTH, 4 * WIDTH),
        }.items():
            shapes[f"{block}{name}.weight"], shapes[f"{block}{name}.bias"] = (out, width), (out,)
    state = fill(shapes, seed, embeddings=("class_emb", "pos_", "lvl_embed"))
    for name in state:
        if name.endswith("zero_k_bias"):
            state[name] = torch.zeros(WIDTH)
    state["head.weight"] *= 3
    level = torch.tensor([scale for scale, side in enumerate(sides) for _ in range(side**2)])
    bias = torch.zeros(places, places).masked_fill(level[:, None] < level, -math.inf)
    return state | {"lvl_1L": level[None], "attn_bias_for_masking": bias[None, None]}


def vae_state(seed: int = 1, convolutions: int = 4) -> State:
    """The image tokenizer: latent diffusion's, with q, k and v stacked, and the scales' convolutions."""
    lowest = (len(PIXELS) - 1,)
    shapes = ldm_shapes(PIXELS, LATENTS, attends=lowest, decoder_attends=lowest, outputs=LATENTS)
    shapes["quantize.embedding.weight"] = (VOCABULARY, LATENTS)
    smoothing = [f"quantize.quant_resi.qresi_ls.{index}" for index in range(convolutions)]
    smoothing = ["quantize.quant_resi.qresi"] if convolutions == 1 else smoothing
    for name in (*smoothing, "quant_conv", "post_quant_conv"):
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = (LATENTS, LATENTS, 3, 3), (LATENTS,)
    state = fill(shapes, seed, embeddings=("quantize.embedding",))
    for name in [name for name in state if ".q." in name]:
        parts = [state.pop(name.replace(".q.", f".{part}.")) for part in "qkv"]
        state[name.replace(".q.", ".qkv.")] = torch.cat(parts)
    return state | {"quantize.ema_vocab_hit_SV": torch.zeros(len(SIDES), VOCABULARY)}


def naive_logits(state: State, label: int, read: Sequence[Tensor], heads: int = HEADS) -> Tensor:
    """[p * p, V] logits of the last scale of those that are read, [p * p, c] each."""
    condition = state["class_emb.weight"][label]
    width = len(condition)

    def linear(name: str, rows: Tensor) -> Tensor:
        return rows @ state[f"{name}.weight"].T + state[f"{name}.bias"]

    def modulated(rows: Tensor, scale: Tensor, shift: Tensor) -> Tensor:
        return F.layer_norm(rows, rows.shape[1:], eps=1e-6) * (1 + scale) + shift

    def split(rows: Tensor) -> Tensor:
        return rows.unflatten(1, (heads, -1)).transpose(0, 1)

    rows = torch.cat([condition + state["pos_start"][0], *(linear("word_embed", each) for each in read[1:])])
    level = [scale for scale, each in enumerate(read) for _ in each]
    rows = rows + state["pos_1LC"][0, : len(rows)] + state["lvl_embed.weight"][level]
    sees = by_blocks(level)
    for block in sorted({name.partition(".")[2].partition(".")[0] for name in state if "blocks." in name}):
        own = f"blocks.{block}."
        if "shared_ada_lin.1.weight" in state:
            parts = (
                linear("shared_ada_lin.1", F.silu(condition)).view(6, width) + state[own + "ada_gss"][0, 0]
            )
        else:
            parts = linear(own + "ada_lin.1", F.silu(condition)).view(6, width)
        gate, inner_gate, scale, inner_scale, shift, inner_shift = parts
        stacked = modulated(rows, scale, shift) @ state[own + "attn.mat_qkv.weight"].T
        stacked = stacked + torch.cat([state[f"{own}attn.{n}"] for n in ("q_bias", "zero_k_bias", "v_bias")])
        queries, keys, values = map(split, stacked.chunk(3, 1))
        if (learned := state.get(own + "attn.scale_mul_1H11")) is not None:
            queries = F.normalize(queries, dim=-1) * learned[0].clamp_max(math.log(100)).exp()
            scores = queries @ F.normalize(keys, dim=-1).transpose(1, 2)
        else:
            scores = queries @ keys.transpose(1, 2) * 0.25 / math.sqrt(width // heads)
        attended = (scores.masked_fill(~sees, -math.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)
        rows = rows + gate * linear(own + "attn.proj", attended)
        inner = F.gelu(linear(own + "ffn.fc1", modulated(rows, inner_scale, inner_shift)), approximate="tanh")
        rows = rows + inner_gate * linear(own + "ffn.fc2", inner)
    scale, shift = linear("head_nm.ada_lin.1", F.silu(condition)).view(2, width)
    return linear("head", modulated(rows[-len(read[-1]) :], scale, shift))


def naive_added(vae: State, sides: Sequence[int], scale: int, tokens: Sequence[int]) -> Tensor:
    """Return the features that the tokens of a scale add: [1, c, P, P]."""
    names = sorted(n.removesuffix(".weight") for n in vae if "quant_resi" in n and n.endswith(".weight"))
    count, share = len(names), scale / (len(sides) - 1)
    edge = 1 / 3 / count if count == 4 else 1 / 2 / count
    name = names[int(np.argmin(np.abs(np.linspace(edge, 1 - edge, count) - share)))]
    found = vae["quantize.embedding.weight"][list(tokens)].T.reshape(1, -1, sides[scale], sides[scale])
    if scale < len(sides) - 1:
        found = F.interpolate(found, size=(sides[-1], sides[-1]), mode="bicubic")
    return 0.5 * found + 0.5 * F.conv2d(found, vae[f"{name}.weight"], vae[f"{name}.bias"], padding=1)


def naive_features(vae: State, sides: Sequence[int], tokens: Sequence[int]) -> Tensor:
    """Return the sum of the features of all scales: [1, c, P, P]."""
    parts = torch.tensor(tokens).split([side**2 for side in sides])
    return sum(naive_added(doubled(vae), sides, scale, part.tolist()) for scale, part in enumerate(parts))


def naive_var(
    state: State, vae: State, sides: Sequence[int], label: int, cfg: float, choose: Choose
) -> list[int]:
    state, vae = doubled(state), doubled(vae)
    total = torch.zeros(1, LATENTS, sides[-1], sides[-1], dtype=torch.float64)
    read: list[Tensor] = []
    tokens: list[int] = []
    for scale, side in enumerate(sides):
        read.append(F.interpolate(total, size=(side, side), mode="area")[0].flatten(1).T)
        asked, other = (naive_logits(state, each, read) for each in (label, LABELS))
        t = cfg * scale / (len(sides) - 1)
        mixed = (1 + t) * asked - t * other
        chosen = [choose(len(tokens) + index, row) for index, row in enumerate(mixed)]
        total = total + naive_added(vae, sides, scale, chosen)
        tokens += chosen
    return tokens
