"""LlamaGen's image tokenizer from its official keys, as functions."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

State = dict[str, Tensor]


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
    return inner + (convolve(state, f"{name}.nin_shortcut", x) if f"{name}.nin_shortcut.bias" in state else x)


def attention(state: State, name: str, x: Tensor) -> Tensor:
    rows, channels, height, width = x.shape
    normed = group_norm(state, f"{name}.norm", x)
    query, key, value = (convolve(state, f"{name}.{part}", normed).flatten(2) for part in "qkv")
    weights = torch.softmax(query.transpose(1, 2) @ key * channels**-0.5, dim=-1)  # [B, queries, keys]
    mixed = (value @ weights.transpose(1, 2)).reshape(rows, channels, height, width)
    return x + convolve(state, f"{name}.proj_out", mixed)


def levels(state: State, part: str) -> int:
    return 1 + max(int(name.split(".")[2]) for name in state if name.startswith(f"{part}.conv_blocks."))


def middle(state: State, part: str, x: Tensor) -> Tensor:
    x = attention(state, f"{part}.mid.1", residual(state, f"{part}.mid.0", x))
    return residual(state, f"{part}.mid.2", x)


def stage(state: State, name: str, blocks: int, x: Tensor) -> Tensor:
    for block in range(blocks):
        x = residual(state, f"{name}.res.{block}", x)
        if f"{name}.attn.{block}.q.bias" in state:
            x = attention(state, f"{name}.attn.{block}", x)
    return x


def naive_encode(state: State, pixels: Tensor) -> Tensor:
    """[B, h, w] indices."""
    x = convolve(state, "encoder.conv_in", pixels)
    for level in range(levels(state, "encoder")):
        name = f"encoder.conv_blocks.{level}"
        x = stage(state, name, 2, x)
        if f"{name}.downsample.conv.bias" in state:
            x = convolve(state, f"{name}.downsample.conv", F.pad(x, (0, 1, 0, 1)), stride=2, padding=0)
    x = middle(state, "encoder", x)
    x = convolve(state, "encoder.conv_out", swish(group_norm(state, "encoder.norm_out", x)))
    latents = F.normalize(convolve(state, "quant_conv", x), dim=1).permute(0, 2, 3, 1)
    return (latents @ F.normalize(state["quantize.embedding.weight"], dim=-1).T).argmax(-1)


def naive_decode(state: State, tokens: Tensor) -> Tensor:
    """[B, 3, H, W] of [B, h, w] indices."""
    latents = F.normalize(state["quantize.embedding.weight"], dim=-1)[tokens].permute(0, 3, 1, 2)
    x = convolve(state, "decoder.conv_in", convolve(state, "post_quant_conv", latents))
    x = middle(state, "decoder", x)
    for level in range(levels(state, "decoder")):
        name = f"decoder.conv_blocks.{level}"
        x = stage(state, name, 3, x)
        if f"{name}.upsample.conv.bias" in state:
            x = convolve(state, f"{name}.upsample.conv", x.repeat_interleave(2, 2).repeat_interleave(2, 3))
    return convolve(state, "decoder.conv_out", swish(group_norm(state, "decoder.norm_out", x)))
