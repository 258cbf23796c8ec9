"""Autoencoders by the names of latent diffusion and of LlamaGen: shapes, and their parts as functions."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.families.official_layout import fill

State = Mapping[str, Tensor]
Shapes = dict[str, tuple[int, ...]]
Held = TypeVar("Held")
#: Parts by latent diffusion's names and LlamaGen's; levels of the latter's decoder begin with the lowest.
PARTS = (
    (".mid.block_1.", ".mid.0."),
    (".mid.attn_1.", ".mid.1."),
    (".mid.block_2.", ".mid.2."),
    (".block.", ".res."),
)


def ldm_shapes(
    widths: Sequence[int],
    latents: int,
    blocks: int = 2,
    attends: Sequence[int] = (),
    decoder_attends: Sequence[int] = (),
    outputs: int | None = None,
    quant: bool = False,
) -> Shapes:
    """Names and shapes; by default the encoder gives means and deviations; `up.0` has the most pixels."""
    shapes: Shapes = {}
    outputs = 2 * latents if outputs is None else outputs

    def add(name: str, *shape: int) -> None:
        shapes[f"{name}.weight"], shapes[f"{name}.bias"] = shape, shape[:1]

    def block(name: str, inputs: int, outputs: int) -> None:
        add(f"{name}.norm1", inputs)
        add(f"{name}.conv1", outputs, inputs, 3, 3)
        add(f"{name}.norm2", outputs)
        add(f"{name}.conv2", outputs, outputs, 3, 3)
        if inputs != outputs:
            add(f"{name}.nin_shortcut", outputs, inputs, 1, 1)

    def attend(name: str, channels: int) -> None:
        add(f"{name}.norm", channels)
        for part in ("q", "k", "v", "proj_out"):
            add(f"{name}.{part}", channels, channels, 1, 1)

    def middle(name: str, channels: int) -> None:
        block(f"{name}.mid.block_1", channels, channels)
        attend(f"{name}.mid.attn_1", channels)
        block(f"{name}.mid.block_2", channels, channels)

    channels = widths[0]
    add("encoder.conv_in", channels, 3, 3, 3)
    for level, width in enumerate(widths):
        for index in range(blocks):
            block(f"encoder.down.{level}.block.{index}", channels, width)
            channels = width
            if level in attends:
                attend(f"encoder.down.{level}.attn.{index}", width)
        if level < len(widths) - 1:
            add(f"encoder.down.{level}.downsample.conv", width, width, 3, 3)
    middle("encoder", channels)
    add("encoder.norm_out", channels)
    add("encoder.conv_out", outputs, channels, 3, 3)
    add("decoder.conv_in", channels, latents, 3, 3)
    middle("decoder", channels)
    for level in reversed(range(len(widths))):
        for index in range(blocks + 1):
            block(f"decoder.up.{level}.block.{index}", channels, widths[level])
            channels = widths[level]
            if level in decoder_attends:
                attend(f"decoder.up.{level}.attn.{index}", channels)
        if level:
            add(f"decoder.up.{level}.upsample.conv", channels, channels, 3, 3)
    add("decoder.norm_out", channels)
    add("decoder.conv_out", 3, channels, 3, 3)
    if quant:
        add("quant_conv", outputs, outputs, 1, 1)
        add("post_quant_conv", latents, latents, 1, 1)
    return shapes


def vq_shapes(multipliers: Sequence[int], base: int = 32, codes: int = 64) -> Shapes:
    """LlamaGen's image tokenizer, whose lowest level attends."""
    widths, lowest = [base * multiplier for multiplier in multipliers], (len(multipliers) - 1,)
    shapes = ldm_shapes(widths, 24, attends=lowest, decoder_attends=lowest, outputs=24)
    named = renamed(shapes, PARTS, len(widths))
    return named | {
        "quantize.embedding.weight": (codes, 8),
        "quantize.codebook_used": (65536,),
        "quant_conv.weight": (8, 24, 1, 1),
        "quant_conv.bias": (8,),
        "post_quant_conv.weight": (24, 8, 1, 1),
        "post_quant_conv.bias": (24,),
    }


def vq_state(multipliers: Sequence[int], seed: int = 0) -> dict[str, Tensor]:
    return fill(vq_shapes(multipliers), seed, embeddings=("quantize.",))


def renamed(held: Mapping[str, Held], parts: Sequence[tuple[str, str]], levels: int) -> dict[str, Held]:
    """Rename tensors to the other layout."""

    def other(match: re.Match[str]) -> str:
        level = int(match[3]) if match[1] == "encoder" else levels - 1 - int(match[3])
        theirs = (
            {"encoder": "down", "decoder": "up"}[match[1]] if match[2] == "conv_blocks" else "conv_blocks"
        )
        return f"{match[1]}.{theirs}.{level}."

    found = {}
    for name, value in held.items():
        name = re.sub(r"^(encoder|decoder)\.(down|up|conv_blocks)\.(\d+)\.", other, name)
        for one, another in parts:
            name = name.replace(one, another)
        found[name] = value
    return found


def from_llamagen(state: State) -> dict[str, Tensor]:
    levels = 1 + max(int(name.split(".")[2]) for name in state if name.startswith("encoder.conv_blocks."))
    return renamed(state, [(theirs, ours) for ours, theirs in PARTS], levels)


def convolve(state: State, name: str, x: Tensor, stride: int = 1, padding: int | None = None) -> Tensor:
    weight = state[f"{name}.weight"]
    padding = weight.shape[-1] // 2 if padding is None else padding
    return F.conv2d(x, weight, state[f"{name}.bias"], stride, padding)


def group_norm(state: State, name: str, x: Tensor) -> Tensor:
    return F.group_norm(x, 32, state[f"{name}.weight"], state[f"{name}.bias"], 1e-6)


def swish(x: Tensor) -> Tensor:
    return x * torch.sigmoid(x)


def residual(state: State, name: str, x: Tensor) -> Tensor:
    inner = convolve(state, f"{name}.conv1", swish(group_norm(state, f"{name}.norm1", x)))
    inner = convolve(state, f"{name}.conv2", swish(group_norm(state, f"{name}.norm2", inner)))
    return inner + maybe(state, f"{name}.nin_shortcut", x)


def attention(state: State, name: str, x: Tensor) -> Tensor:
    rows, channels, height, width = x.shape
    normed = group_norm(state, f"{name}.norm", x)
    query, key, value = (convolve(state, f"{name}.{part}", normed).flatten(2) for part in "qkv")
    weights = torch.softmax(query.transpose(1, 2) @ key * channels**-0.5, dim=-1)  # [B, queries, keys]
    mixed = (value @ weights.transpose(1, 2)).reshape(rows, channels, height, width)
    return x + convolve(state, f"{name}.proj_out", mixed)


def maybe(state: State, name: str, x: Tensor) -> Tensor:
    return convolve(state, name, x) if f"{name}.weight" in state else x


def middle(state: State, part: str, x: Tensor) -> Tensor:
    x = attention(state, f"{part}.mid.attn_1", residual(state, f"{part}.mid.block_1", x))
    return residual(state, f"{part}.mid.block_2", x)


def stage(state: State, name: str, x: Tensor) -> Tensor:
    index = 0
    while f"{name}.block.{index}.conv1.bias" in state:
        x = residual(state, f"{name}.block.{index}", x)
        if f"{name}.attn.{index}.q.bias" in state:
            x = attention(state, f"{name}.attn.{index}", x)
        index += 1
    return x


def levels_of(state: State) -> int:
    return 1 + max(int(name.split(".")[2]) for name in state if name.startswith("decoder.up."))


def naive_latents(state: State, pixels: Tensor) -> Tensor:
    """[B, outputs, h, w] of images [B, 3, H, W]."""
    x = convolve(state, "encoder.conv_in", pixels)
    for level in range(levels_of(state)):
        x = stage(state, f"encoder.down.{level}", x)
        if f"encoder.down.{level}.downsample.conv.bias" in state:
            padded = F.pad(x, (0, 1, 0, 1))
            x = convolve(state, f"encoder.down.{level}.downsample.conv", padded, stride=2, padding=0)
    x = swish(group_norm(state, "encoder.norm_out", middle(state, "encoder", x)))
    return maybe(state, "quant_conv", convolve(state, "encoder.conv_out", x))


def naive_pixels(state: State, latents: Tensor) -> Tensor:
    """Images [B, 3, H, W] of latents [B, latents, h, w]."""
    x = convolve(state, "decoder.conv_in", maybe(state, "post_quant_conv", latents))
    x = middle(state, "decoder", x)
    for level in reversed(range(levels_of(state))):
        x = stage(state, f"decoder.up.{level}", x)
        if f"decoder.up.{level}.upsample.conv.bias" in state:
            doubled = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
            x = convolve(state, f"decoder.up.{level}.upsample.conv", doubled)
    return convolve(state, "decoder.conv_out", swish(group_norm(state, "decoder.norm_out", x)))


def naive_encode(state: State, pixels: Tensor) -> Tensor:
    """[B, h, w] indices of LlamaGen's codes."""
    latents = F.normalize(naive_latents(from_llamagen(state), pixels), dim=1).permute(0, 2, 3, 1)
    return (latents @ F.normalize(state["quantize.embedding.weight"], dim=-1).T).argmax(-1)


def naive_decode(state: State, tokens: Tensor) -> Tensor:
    """[B, 3, H, W] of [B, h, w] indices of LlamaGen's codes."""
    latents = F.normalize(state["quantize.embedding.weight"], dim=-1)[tokens].permute(0, 3, 1, 2)
    return naive_pixels(from_llamagen(state), latents)


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
