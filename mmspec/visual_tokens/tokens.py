"""Visual tokens of several images, padded into one tensor, and their boxes.

A box is the place of a token in its image, as (top, left, bottom, right) in units of the image from 0 to 1,
so that all grids are represented alike. Tokens without a place (newlines, class tokens) have an empty box. A
base view with its tiles is two layers of boxes.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["BOX", "VisualTokens", "nowhere", "overlap", "raster", "square_grid", "whole"]

BOX = 4


@dataclass(frozen=True)
class VisualTokens:
    """Visual tokens of P images, padded to the longest.

    Attributes:
        features: [P, N, d].
        mask: [P, N] False for padding.
        boxes: [P, N, 4] float32 boxes of the tokens.
        summary: [P, d] one vector for the whole image, for drafters that add it to every text row (ViSpec's
            global vector); None from all other compressors.
    """

    features: Tensor
    mask: Tensor
    boxes: Tensor
    summary: Tensor | None = None

    def take(self, index: Tensor, mask: Tensor) -> VisualTokens:
        """Select the tokens at `index` [P, C]; those with `mask` [P, C] False become padding."""
        rows = torch.arange(len(index), device=index.device)[:, None]
        kept = self.features[rows, index].where(mask[..., None], 0.0)
        return VisualTokens(kept, mask, self.boxes[rows, index].where(mask[..., None], 0.0))

    def padded(self, tokens: int) -> VisualTokens:
        """Pad to `tokens` tokens per image, at least N."""
        more = tokens - self.features.shape[1]
        return VisualTokens(
            pad(self.features, (0, 0, 0, more)), pad(self.mask, (0, more)), pad(self.boxes, (0, 0, 0, more))
        )


def raster(rows: int, columns: int) -> Tensor:
    """[rows * columns, 4] boxes of a grid in raster order."""
    sides = [torch.arange(side, dtype=torch.float32, device="cpu") / side for side in (rows, columns)]
    top, left = torch.meshgrid(sides, indexing="ij")
    return torch.stack([top, left, top + 1 / rows, left + 1 / columns], -1).flatten(0, 1)


def nowhere(count: int) -> Tensor:
    """[count, 4] empty boxes."""
    return torch.zeros(count, BOX, dtype=torch.float32, device="cpu")


def whole(like: Tensor) -> Tensor:
    """[..., 4] boxes of the whole image, one for each token of `like` [..., d]."""
    box = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float32, device=like.device)
    return box.expand(*like.shape[:-1], BOX)


def square_grid(cells: int) -> tuple[int, int]:
    """The grid of exactly `cells` cells that is closest to a square: rows <= columns."""
    rows = next(rows for rows in range(math.isqrt(cells), 0, -1) if cells % rows == 0)
    return rows, cells // rows


def overlap(boxes: Tensor, cells: Tensor) -> Tensor:
    """[..., N, 4] boxes and [C, 4] cells -> [..., C, N] shares of each cell's area that the boxes cover."""
    ours, theirs = cells[:, None, :], boxes[..., None, :, :]
    first = torch.maximum(ours[..., :2], theirs[..., :2])
    last = torch.minimum(ours[..., 2:], theirs[..., 2:])
    area = (last - first).clamp_min(0.0).prod(-1)
    return area / (ours[..., 2:] - ours[..., :2]).prod(-1)
