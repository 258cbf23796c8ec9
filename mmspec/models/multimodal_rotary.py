"""Rotary positions of three axes: time, height and width (M-RoPE; Qwen2-VL, 2409.12191, section 2.1)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

__all__ = ["MultimodalRotary"]


class MultimodalRotary(nn.Module):
    """Cosines and sines by which attention turns queries and keys; without state, so that nothing is loaded.

    Args:
        head_dim: how many numbers of each head are turned.
        theta: base of the frequencies.
        section: how many frequencies follow each axis; they add up to head_dim / 2.
        interleaved: the axes take turns, and time has the rest (Qwen3-VL); else they follow one another.
    """

    def __init__(self, head_dim: int, theta: float, section: Sequence[int], *, interleaved: bool) -> None:
        super().__init__()
        self.head_dim, self.theta, self.section, self.interleaved = head_dim, theta, section, interleaved

    @torch.no_grad()
    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """Make the tables [B, n, head_dim] for positions [3, B, n], or [B, n] of one axis.

        Args:
            x: whose dtype the tables have.
            position_ids: integers.
        """
        index = torch.arange(self.head_dim // 2, device=position_ids.device)
        time, height, width = self.section
        if self.interleaved:
            is_height = (index % 3 == 1) & (index < 3 * height)
            is_width = (index % 3 == 2) & (index < 3 * width)
        else:
            is_width = index >= time + height
            is_height = (index >= time) & ~is_width
        over_time, over_height, over_width = position_ids.expand(3, *position_ids.shape[-2:])[..., None]
        position = torch.where(is_height, over_height, torch.where(is_width, over_width, over_time))
        angle = position * self.theta ** (-2.0 * index / self.head_dim)
        angle = torch.cat([angle, angle], -1)
        return angle.cos().to(x.dtype), angle.sin().to(x.dtype)
