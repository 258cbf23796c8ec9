"""LPD, NAR and PAR by their published names: random weights, and decoding in plain loops without a cache.

Float64, one image at a time: each forward pass processes the whole sequence, with an explicit mask.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.families.official_layout import CLASSES, GRID, HEADS, VOCABULARY, WIDTH, fill, transformer_shapes

LABELS = CLASSES["classes"]
CELLS = GRID * GRID
State = dict[str, Tensor]
#: Token of a cell, given its logits [V] under guidance.
Choose = Callable[[int, Tensor], int]
Guide = Callable[[int], float]


def lpd_state(seed: int = 0, layers: int = 2) -> State:
    shapes: dict[str, tuple[int, ...]] = {
        "class_emb.weight": (LABELS, WIDTH),
        "token_emb.weight": (VOCABULARY, WIDTH),
        "fake_latent": (1, WIDTH),
        "pos_embed": (1, CELLS + 1, WIDTH),
        "mask_token": (1, 1, WIDTH),
        "head.weight": (VOCABULARY, WIDTH),
    }
    for index in range(layers):
        block = f"blocks.{index}."
        for name, (out, width) in {
            "attn.qkv": (3 * WIDTH, WIDTH),
            "attn.proj": (WIDTH, WIDTH),
            "mlp.fc1": (4 * WIDTH, WIDTH),
            "mlp.fc2": (WIDTH, 4 * WIDTH),
        }.items():
            shapes[f"{block}{name}.weight"], shapes[f"{block}{name}.bias"] = (out, width), (out,)
    norms = [f"blocks.{index}.norm{part}" for index in range(layers) for part in (1, 2)]
    for norm in ("z_proj_ln", "norm", *norms):
        shapes[f"{norm}.weight"] = shapes[f"{norm}.bias"] = (WIDTH,)
    state = fill(shapes, seed, embeddings=("class", "token", "fake", "pos", "mask"))
    for name in ("z_proj_ln.weight", "z_proj_ln.bias"):  # its name holds no "norm"
        state[name] = 0.1 * state[name] + float(name.endswith("weight"))
    state["head.weight"] *= 3
    return state


def nar_state(seed: int = 0) -> State:
    shapes = transformer_shapes(layers=3, classes=LABELS)  # the last one predicts below
    shapes |= {"medusa_norm.weight": (WIDTH,), "medusa_output.weight": (VOCABULARY, WIDTH)}
    state = fill(shapes, seed, embeddings=("tok_embeddings", "cls_embedding.e"))
    state["medusa_output.weight"] *= 3
    return state


def par_state(seed: int = 0, regions: int = 4) -> State:
    shapes = transformer_shapes(classes=LABELS)
    shapes["spe_tok_embeddings.special_embeddings.weight"] = (regions - 1, WIDTH)
    return fill(shapes, seed, embeddings=("tok_embeddings", "cls_embedding.e", "spe_tok"))


def attend(queries: Tensor, keys: Tensor, values: Tensor, sees: Tensor) -> Tensor:
    """[T, D] of heads side by side."""
    queries, keys, values = (
        each.unflatten(1, (HEADS, -1)).transpose(0, 1) for each in (queries, keys, values)
    )
    scores = queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[2])
    return (scores.masked_fill(~sees, -math.inf).softmax(-1) @ values).transpose(0, 1).flatten(1)


def layer_norm(state: State, name: str, rows: Tensor) -> Tensor:
    return F.layer_norm(rows, rows.shape[1:], state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)


def linear(state: State, name: str, rows: Tensor) -> Tensor:
    return rows @ state[f"{name}.weight"].T + state[f"{name}.bias"]


def vit_block(state: State, name: str, rows: Tensor, sees: Tensor) -> Tensor:
    """[T, D] -> [T, D]"""
    stacked = linear(state, f"{name}.attn.qkv", layer_norm(state, f"{name}.norm1", rows))
    rows = rows + linear(state, f"{name}.attn.proj", attend(*stacked.chunk(3, 1), sees))
    inner = F.gelu(linear(state, f"{name}.mlp.fc1", layer_norm(state, f"{name}.norm2", rows)))
    return rows + linear(state, f"{name}.mlp.fc2", inner)


def vit(state: State, rows: Tensor, sees: Tensor) -> Tensor:
    """[T, V] logits of vectors that are placed."""
    rows = layer_norm(state, "z_proj_ln", rows)
    for block in sorted({match[0] for name in state if (match := re.match(r"blocks\.\d+", name))}):
        rows = vit_block(state, block, rows, sees)
    return layer_norm(state, "norm", rows) @ state["head.weight"].T


def llama(state: State, rows: Tensor, cells: Sequence[int | None], sees: Tensor) -> list[Tensor]:
    """[T, D] states after every layer of LlamaGen; without a cell nothing is rotated but to zero."""
    turn = torch.zeros(len(rows), WIDTH // HEADS // 2, dtype=torch.complex128)
    frequencies = 10000.0 ** -(torch.arange(WIDTH // HEADS // 4) / (WIDTH // HEADS // 4)).double()
    for index, cell in enumerate(cells):
        if cell is not None:
            angles = torch.cat([cell // GRID * frequencies, cell % GRID * frequencies])
            turn[index] = torch.polar(torch.ones_like(angles), angles)

    def rotated(vectors: Tensor) -> Tensor:
        pairs = torch.view_as_complex(vectors.unflatten(1, (HEADS, -1, 2)).contiguous())
        return torch.view_as_real(pairs * turn[:, None]).flatten(1)

    states = []
    for layer in sorted({match[0] for name in state if (match := re.match(r"layers\.\d+", name))}):
        weights = {name: state[f"{layer}.{name}.weight"] for name in ("attention.wqkv", "attention.wo")}
        w1, w2, w3 = (state[f"{layer}.feed_forward.w{index}.weight"] for index in (1, 2, 3))
        stacked = rms(rows, state[f"{layer}.attention_norm.weight"]) @ weights["attention.wqkv"].T
        queries, keys, values = stacked.chunk(3, 1)
        rows = rows + attend(rotated(queries), rotated(keys), values, sees) @ weights["attention.wo"].T
        inner = rms(rows, state[f"{layer}.ffn_norm.weight"])
        rows = rows + (F.silu(inner @ w1.T) * (inner @ w3.T)) @ w2.T
        states.append(rows)
    return states


def rms(rows: Tensor, weight: Tensor) -> Tensor:
    return rows / (rows.square().mean(1, keepdim=True) + 1e-5).sqrt() * weight


def by_blocks(blocks: Sequence[int]) -> Tensor:
    """[T, T] what sees what: each block itself and all before."""
    block = torch.tensor(blocks)
    return block[:, None] >= block


def doubled(state: State) -> State:
    return {name: tensor.double() for name, tensor in state.items()}


def lpd_logits(
    state: State,
    label: int | None,
    groups: Sequence[Sequence[int]],
    tokens: dict[int, int],
    asked: Sequence[int],
) -> Tensor:
    """[L, V] logits of the cells that are asked for, given groups of cells that were decided before."""
    state = doubled(state)
    known = [cell for group in groups for cell in group]
    condition = state["fake_latent"] if label is None else state["class_emb.weight"][label][None]
    vectors = [condition, state["token_emb.weight"][[tokens[cell] for cell in known]]]
    vectors.append(state["mask_token"][0].expand(len(asked), -1))
    places = [0, *(cell + 1 for cell in known), *(cell + 1 for cell in asked)]
    blocks = [-1] + [index for index, group in enumerate(groups) for _ in group]
    sees = by_blocks([*blocks, *[len(groups)] * len(asked)])  # nothing comes after the queries
    return vit(state, torch.cat(vectors) + state["pos_embed"][0, places], sees)[len(places) - len(asked) :]


def naive_lpd(
    state: State, label: int, groups: Sequence[Sequence[int]], scale: Guide, choose: Choose
) -> list[int]:
    tokens: dict[int, int] = {}
    for index, group in enumerate(groups):
        asked, other = (lpd_logits(state, each, groups[:index], tokens, group) for each in (label, None))
        for rank, cell in enumerate(group):
            mixed = other[rank] + scale(len(tokens)) * (asked[rank] - other[rank])
            tokens[cell] = choose(cell, mixed)
    return [tokens[cell] for cell in range(CELLS)]


def naive_maskgit(
    state: State,
    label: int,
    counts: Sequence[int],
    scale: Guide,
    draw: Callable[[int, int, Tensor], tuple[int, float]],
) -> list[int]:
    """An image by confidence; `draw` gives a token and its confidence, of (iteration, cell, logits)."""
    tokens: dict[int, int] = {}
    groups: list[list[int]] = []
    for iteration, count in enumerate(counts):
        open_cells = [cell for cell in range(CELLS) if cell not in tokens]
        asked, other = (lpd_logits(state, each, groups, tokens, open_cells) for each in (label, None))
        mixed = other + scale(len(tokens)) * (asked - other)
        drawn = {cell: draw(iteration, cell, logits) for cell, logits in zip(open_cells, mixed, strict=True)}
        surest = sorted(open_cells, key=lambda cell: -drawn[cell][1])[:count]
        groups.append(surest)
        tokens |= {cell: drawn[cell][0] for cell in surest}
    return [tokens[cell] for cell in range(CELLS)]


def prefix(state: State, label: int | None) -> Tensor:
    return state["cls_embedding.embedding_table.weight"][LABELS if label is None else label][None]


def naive_nar(state: State, label: int, scale: float, choose: Choose) -> list[int]:
    state, tokens = doubled(state), dict[int, int]()

    def predicted(label: int | None) -> tuple[list[int], Tensor, Tensor]:
        known = list(tokens)
        rows = torch.cat([prefix(state, label), state["tok_embeddings.weight"][list(tokens.values())]])
        diagonals = [-1, *(cell // GRID + cell % GRID for cell in known)]
        states = llama(state, rows, [None, *known], by_blocks(diagonals))
        right = rms(states[-2], state["norm.weight"]) @ state["output.weight"].T
        return known, right, rms(states[-1], state["medusa_norm.weight"]) @ state["medusa_output.weight"].T

    for diagonal in range(2 * GRID - 1):
        both = [predicted(label), predicted(None)]
        for row in range(GRID):
            column = diagonal - row
            if not 0 <= column < GRID:
                continue
            cell, mixed = row * GRID + column, []
            for known, right, below in both:
                votes = [right[0], below[0]] if diagonal == 0 else []
                votes += [right[1 + known.index(cell - 1)]] if column else []
                votes += [below[1 + known.index(cell - GRID)]] if row else []
                mixed.append(torch.stack(votes).mean(0))
            tokens[cell] = choose(cell, mixed[1] + scale * (mixed[0] - mixed[1]))
    return [tokens[cell] for cell in range(CELLS)]


def naive_par(state: State, label: int, regions: int, scale: float, choose: Choose) -> list[int]:
    side = math.isqrt(regions)
    size = GRID // side
    order = [
        (top * size + row) * GRID + left * size + column
        for row in range(size)
        for column in range(size)
        for top in range(side)
        for left in range(side)
    ]
    return naive_groups(state, label, order, regions, scale, choose)


def naive_groups(
    state: State,
    label: int,
    order: Sequence[int],
    size: int,
    scale: float,
    choose: Choose,
    recent: int | None = None,
) -> list[int]:
    """Tokens of the cells of `order`, the first `size` one by one, then as many together: PAR, and NBP.

    A group sees all before it, or those before the second and the `recent` last ones, itself among them.
    """
    state, chosen = doubled(state), list[int]()
    special = state["spe_tok_embeddings.special_embeddings.weight"]
    while len(chosen) < len(order):
        count = 1 if len(chosen) < size else size
        logits = []
        for each in (label, None):
            first, rest = chosen[:size], chosen[size:]
            rows, cells = (
                [prefix(state, each), state["tok_embeddings.weight"][first]],
                [None, *order[: len(first)]],
            )
            if len(chosen) >= size:
                rows += [special, state["tok_embeddings.weight"][rest]]
                cells += [None] * (size - 1) + list(order[size : len(chosen)])
            # the last of the first tokens and the special ones are a group, and so is each later one
            blocks = [
                place if place <= size else size + (place - size) // size for place in range(len(cells))
            ]
            block = torch.tensor(blocks)
            sees = by_blocks(blocks)
            if recent is not None:
                sees &= (block <= size) | (block[:, None] - block < recent)
            states = llama(state, torch.cat(rows), cells, sees)
            logits.append(rms(states[-1], state["norm.weight"])[-count:] @ state["output.weight"].T)
        mixed = logits[1] + scale * (logits[0] - logits[1])
        cells_of = order[len(chosen) : len(chosen) + count]
        chosen += [choose(cell, row) for cell, row in zip(cells_of, mixed, strict=True)]
    return [chosen[order.index(cell)] for cell in range(len(order))]
