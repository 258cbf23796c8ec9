"""Autoencoders of latent diffusion: their published keys, and encoder and decoder as functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.naive_vq import State, attention, convolve, group_norm, residual, swish


def ldm_shapes(
    widths: Sequence[int], latents: int, blocks: int = 2, attends: Sequence[int] = (), quant: bool = False
) -> dict[str, tuple[int, ...]]:
    """Names and shapes; levels in `attends` of the encoder attend, and `up.0` is the highest resolution."""
    shapes: dict[str, tuple[int, ...]] = {}

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
    add("encoder.conv_out", 2 * latents, channels, 3, 3)
    add("decoder.conv_in", channels, latents, 3, 3)
    middle("decoder", channels)
    for level in reversed(range(len(widths))):
        for index in range(blocks + 1):
            block(f"decoder.up.{level}.block.{index}", channels, widths[level])
            channels = widths[level]
        if level:
            add(f"decoder.up.{level}.upsample.conv", channels, channels, 3, 3)
    add("decoder.norm_out", channels)
    add("decoder.conv_out", 3, channels, 3, 3)
    if quant:
        add("quant_conv", 2 * latents, 2 * latents, 1, 1)
        add("post_quant_conv", latents, latents, 1, 1)
    return shapes


def maybe(state: State, name: str, x: Tensor) -> Tensor:
    return convolve(state, name, x) if f"{name}.weight" in state else x


def middle(state: State, part: str, x: Tensor) -> Tensor:
    x = attention(state, f"{part}.mid.attn_1", residual(state, f"{part}.mid.block_1", x))
    return residual(state, f"{part}.mid.block_2", x)


def naive_means(state: State, levels: int, pixels: Tensor) -> Tensor:
    """[B, latents, h, w] means of the latents of images [B, 3, H, W]."""
    x = convolve(state, "encoder.conv_in", pixels)
    for level in range(levels):
        name = f"encoder.down.{level}"
        for index in range(2):
            x = residual(state, f"{name}.block.{index}", x)
            if f"{name}.attn.{index}.q.bias" in state:
                x = attention(state, f"{name}.attn.{index}", x)
        if level < levels - 1:
            x = convolve(state, f"{name}.downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2, padding=0)
    x = swish(group_norm(state, "encoder.norm_out", middle(state, "encoder", x)))
    return maybe(state, "quant_conv", convolve(state, "encoder.conv_out", x)).chunk(2, dim=1)[0]


def naive_pixels(state: State, levels: int, latents: Tensor, blocks: int = 2) -> Tensor:
    """Images [B, 3, H, W] of latents [B, latents, h, w]."""
    x = convolve(state, "decoder.conv_in", maybe(state, "post_quant_conv", latents))
    x = middle(state, "decoder", x)
    for level in reversed(range(levels)):
        for index in range(blocks + 1):
            x = residual(state, f"decoder.up.{level}.block.{index}", x)
        if level:
            doubled = x.repeat_interleave(2, 2).repeat_interleave(2, 3)
            x = convolve(state, f"decoder.up.{level}.upsample.conv", doubled)
    return convolve(state, "decoder.conv_out", swish(group_norm(state, "decoder.norm_out", x)))


def random_numbers(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))
