"""MAR by its published names: random weights, and the forward as functions of one image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from tests.families.official_layout import fill
from tests.families.parallel_layout import layer_norm, linear, vit_block
from tests.vectors.denoising_layout import net_shapes

WIDTH, HEADS, DEPTH, TOKEN, GRID, BUFFER, CLASSES = 24, 2, 2, 3, 4, 5, 7
HEAD_WIDTH, HEAD_DEPTH = 16, 2
CELLS = GRID * GRID

State = dict[str, Tensor]


def mar_shapes(
    width: int = WIDTH,
    depth: int = DEPTH,
    token: int = TOKEN,
    cells: int = CELLS,
    buffer: int = BUFFER,
    classes: int = CLASSES,
    head_width: int = HEAD_WIDTH,
    head_depth: int = HEAD_DEPTH,
) -> dict[str, tuple[int, ...]]:
    layers = {"z_proj": (width, token), "decoder_embed": (width, width)}
    norms = ["z_proj_ln", "encoder_norm", "decoder_norm"]
    for part in ("encoder_blocks", "decoder_blocks"):
        for block in (f"{part}.{index}." for index in range(depth)):
            norms += [block + "norm1", block + "norm2"]
            layers[block + "attn.qkv"] = (3 * width, width)
            layers[block + "attn.proj"] = (width, width)
            layers[block + "mlp.fc1"] = (4 * width, width)
            layers[block + "mlp.fc2"] = (width, 4 * width)
    shapes: dict[str, tuple[int, ...]] = {
        "fake_latent": (1, width),
        "class_emb.weight": (classes, width),
        "encoder_pos_embed_learned": (1, buffer + cells, width),
        "mask_token": (1, 1, width),
        "decoder_pos_embed_learned": (1, buffer + cells, width),
        "diffusion_pos_embed_learned": (1, cells, width),
    }
    for name in norms:
        shapes[f"{name}.weight"] = shapes[f"{name}.bias"] = (width,)
    for name, shape in layers.items():
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]
    return shapes | net_shapes(token, width, head_width, head_depth, 2 * token, prefix="diffloss.net.")


def mar_state(seed: int = 0) -> State:
    looked_up = ("fake", "class", "mask", "encoder_pos", "decoder_pos", "diffusion")
    return fill(mar_shapes(), seed, embeddings=looked_up)


def seen_by_all(rows: Tensor) -> Tensor:
    return torch.ones(len(rows), len(rows), dtype=torch.bool)


def naive_conditions(state: State, tokens: Tensor, known: Sequence[int], label: int) -> Tensor:
    """[N, D] of tokens [N, d] of one image, of which those at the places `known` are known; in float64."""
    state = {name: tensor.double() for name, tensor in state.items()}
    own = state["fake_latent"][0] if label == CLASSES else state["class_emb.weight"][label]
    places = state["encoder_pos_embed_learned"][0]
    rows = [own + places[index] for index in range(BUFFER)]
    rows += [linear(state, "z_proj", tokens[cell].double()) + places[BUFFER + cell] for cell in known]
    hidden = layer_norm(state, "z_proj_ln", torch.stack(rows))
    for index in range(DEPTH):
        hidden = vit_block(state, f"encoder_blocks.{index}", hidden, seen_by_all(hidden))
    hidden = linear(state, "decoder_embed", layer_norm(state, "encoder_norm", hidden))
    image = [state["mask_token"][0, 0]] * CELLS
    for index, cell in enumerate(known):
        image[cell] = hidden[BUFFER + index]
    hidden = torch.cat([hidden[:BUFFER], torch.stack(image)]) + state["decoder_pos_embed_learned"][0]
    for index in range(DEPTH):
        hidden = vit_block(state, f"decoder_blocks.{index}", hidden, seen_by_all(hidden))
    return layer_norm(state, "decoder_norm", hidden)[BUFFER:] + state["diffusion_pos_embed_learned"][0]
