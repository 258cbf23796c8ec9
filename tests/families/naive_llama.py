"""A Llama layer on one sequence, by its published names, with plain matrix operations."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

HEAD_DIM, EPS = 4, 1e-6


def rms_norm(x: Tensor, weight: Tensor) -> Tensor:
    return weight * x / (x.pow(2).mean(-1, keepdim=True) + EPS).sqrt()


def rotate(x: Tensor, theta: float) -> Tensor:
    """[L, h, w] turned by the index of each row, halves against each other."""
    half = x.shape[-1] // 2
    angle = torch.arange(len(x))[:, None] / theta ** (torch.arange(half) / half)
    cos, sin = angle.cos()[:, None], angle.sin()[:, None]
    first, second = x[..., :half], x[..., half:]
    return torch.cat([first * cos - second * sin, second * cos + first * sin], -1)


def attention(
    weights: Mapping[str, Tensor], x: Tensor, theta: float = 10000.0, window: int | None = None
) -> Tensor:
    """Causal attention over rows [L, w]; heads that share keys stand side by side."""
    q, k, v = (
        (x @ weights[f"self_attn.{name}_proj.weight"].T).unflatten(-1, (-1, HEAD_DIM)) for name in "qkv"
    )
    q, k = rotate(q, theta), rotate(k, theta)
    group = q.shape[1] // k.shape[1]
    mixed = []
    for head in range(q.shape[1]):
        scores = q[:, head] @ k[:, head // group].T / HEAD_DIM**0.5
        scores = scores.masked_fill(torch.ones_like(scores).triu(1).bool(), float("-inf"))
        if window is not None:
            scores = scores.masked_fill(torch.ones_like(scores).tril(-window).bool(), float("-inf"))
        mixed.append(scores.softmax(-1) @ v[:, head // group])
    return torch.cat(mixed, -1) @ weights["self_attn.o_proj.weight"].T


def feed_forward(weights: Mapping[str, Tensor], x: Tensor) -> Tensor:
    gate = x @ weights["mlp.gate_proj.weight"].T
    inner = gate * torch.sigmoid(gate) * (x @ weights["mlp.up_proj.weight"].T)
    return inner @ weights["mlp.down_proj.weight"].T


def layer_weights(width: int, heads: int, groups: int, inner: int, fed: int) -> dict[str, Tensor]:
    """Random weights of a layer whose attention is fed with `fed` numbers a row."""
    shapes = {
        "self_attn.q_proj": (heads * HEAD_DIM, fed),
        "self_attn.k_proj": (groups * HEAD_DIM, fed),
        "self_attn.v_proj": (groups * HEAD_DIM, fed),
        "self_attn.o_proj": (width, heads * HEAD_DIM),
        "mlp.gate_proj": (inner, width),
        "mlp.up_proj": (inner, width),
        "mlp.down_proj": (width, inner),
    }
    made = {f"{name}.weight": torch.randn(shape) / shape[1] ** 0.5 for name, shape in shapes.items()}
    return made | {"post_attention_layernorm.weight": torch.rand(width) + 0.5}
