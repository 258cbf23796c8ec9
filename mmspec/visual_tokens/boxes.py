"""Boxes: the places of visual tokens in their image, so that every grid is one case.

A box is (top, left, bottom, right) in units of the image, from 0 to 1. Tokens that stand for no place
(newlines, class tokens) have an empty box. A base view with its tiles is then simply two layers of boxes.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

__all__ = ["BOX", "nowhere", "overlap", "raster", "square_grid", "whole"]

BOX = 4


def raster(rows: int, columns: int) -> Tensor:
    """[rows * columns, 4] boxes of a grid in raster order."""
    sides = [torch.arange(side, dtype=torch.float32, device="cpu") / side for side in (rows, columns)]
    top, left = torch.meshgrid(sides, indexing="ij")
    return torch.stack([top, left, top + 1 / rows, left + 1 / columns], -1).flatten(0, 1)


def nowhere(count: int) -> Tensor:
    """[count, 4] empty boxes."""
    return torch.zeros(count, BOX, dtype=torch.float32, device="cpu")


def whole(like: Tensor) -> Tensor:
    """[..., 4] boxes of the whole image, for as many tokens as `like` [..., d] has."""
    box = torch.tensor([0.0, 0.0, 1.0, 1.0], dtype=torch.float32, device=like.device)
    return box.expand(*like.shape[:-1], BOX)


def square_grid(cells: int) -> tuple[int, int]:
    """The grid of exactly that many cells that is nearest to a square: rows <= columns."""
    rows = next(rows for rows in range(math.isqrt(cells), 0, -1) if cells % rows == 0)
    return rows, cells // rows


def overlap(boxes: Tensor, cells: Tensor) -> Tensor:
    """[..., N, 4] boxes and [C, 4] cells -> [..., C, N] shares of each cell's area that the boxes cover."""
    ours, theirs = cells[:, None, :], boxes[..., None, :, :]
    first = torch.maximum(ours[..., :2], theirs[..., :2])
    last = torch.minimum(ours[..., 2:], theirs[..., 2:])
    area = (last - first).clamp_min(0.0).prod(-1)
    return area / (ours[..., 2:] - ours[..., :2]).prod(-1)
