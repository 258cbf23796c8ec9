"""Rotary positions of a raster: half of the pairs turn with the row, half with the column.

It knows where a token stands in the image; it does not know what attends to what.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.models.llamagen.configuration import LlamaGenConfig

__all__ = ["raster_rotation", "rotate_pairs"]


def raster_rotation(position_ids: Tensor, config: LlamaGenConfig) -> tuple[Tensor, Tensor]:
    """Cosines and sines of positions (2406.06525, official `precompute_freqs_cis_2d`).

    Position C + k is raster cell k. Condition slots and positions beyond the image have cos = sin = 0,
    not cos = 1: that makes their queries and keys zero, so every query weighs all the condition slots that
    it sees alike. Computed afresh in double precision, because a table would be one more buffer for `meta`
    devices and casts to spoil.

    Args:
        position_ids: [B, T] places in the sequence, the first condition slot being 0.
        config: says where the image begins and how wide it is.

    Returns:
        Two tensors [B, T, head_dim / 2], float64 on devices that have it, else float32.
    """
    pairs = config.head_dim // 4  # for the row, and as many for the column
    dtype = torch.float32 if position_ids.device.type == "mps" else torch.float64
    exponents = torch.arange(pairs, device=position_ids.device, dtype=dtype) / pairs
    frequencies = config.rope_base**-exponents
    cell = position_ids - config.prefix_length
    inside = ((cell >= 0) & (cell < config.image_tokens))[..., None]
    row, column = cell // config.grid_size, cell % config.grid_size
    angles = torch.cat([row[..., None] * frequencies, column[..., None] * frequencies], dim=-1)
    return angles.cos() * inside, angles.sin() * inside


def rotate_pairs(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Turn the adjacent pairs (2m, 2m + 1) of every head, in float32 at least, and cast back.

    Args:
        states: [B, heads, T, head_dim] queries or keys.
        cos, sin: [B, T, head_dim / 2].
    """
    even, odd = states.to(cos.dtype).unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[:, None], sin[:, None]
    turned = torch.stack([even * cos - odd * sin, odd * cos + even * sin], dim=-1)
    return turned.flatten(-2).to(states.dtype)
