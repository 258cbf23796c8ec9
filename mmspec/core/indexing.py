"""Gather and scatter values at nodes or places of each row: ids [B, n] or vectors [B, n, d] alike."""

from __future__ import annotations

from torch import Tensor

__all__ = ["pick", "put", "take"]


def pick(values: Tensor, index: Tensor) -> Tensor:
    """Pick several values of each row: values [B, n, ...], index [B, m] -> [B, m, ...]."""
    return values.gather(1, _widened(index, values))


def take(values: Tensor, index: Tensor) -> Tensor:
    """Take one value of each row: values [B, n, ...], index [B] -> [B, ...]."""
    return pick(values, index[:, None])[:, 0]


def put(values: Tensor, index: Tensor, new: Tensor) -> None:
    """Write new [B, m, ...] over the values [B, n, ...] at index [B, m] of each row, in place."""
    values.scatter_(1, _widened(index, values), new)


def _widened(index: Tensor, values: Tensor) -> Tensor:
    if values.dim() == 2:
        return index
    return index.view(*index.shape, *[1] * (values.dim() - 2)).expand(*index.shape, *values.shape[2:])
