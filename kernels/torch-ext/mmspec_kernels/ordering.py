"""Largest numbers and stable sorting of the last dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["largest", "sort_stably"]


def largest(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Find the k largest of numbers [..., V], k the most of some counts from 1 to V.

    Returns:
        [..., k]; for each count the count-th largest is at index count - 1, the others in any order.
    """
    is_on_host = x.device.type == "cpu" and x.dtype == torch.float32
    return _largest_on_host(x, counts) if is_on_host else _largest_in_torch(x, counts)


def _largest_in_torch(x: Tensor, counts: Sequence[int]) -> Tensor:
    return x.topk(max(counts), dim=-1).values


def _largest_on_host(x: Tensor, counts: Sequence[int]) -> Tensor:
    """By NumPy, which finds them several times faster than torch."""
    values = (-x).numpy()
    values.partition(sorted({count - 1 for count in counts}), axis=-1)
    return -torch.from_numpy(values[..., : max(counts)])


def sort_stably(x: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sort numbers [..., V] as `Tensor.sort(stable=True)`, where they are not NaN; values and indices."""
    is_on_host = x.device.type == "cpu" and x.dtype == torch.float32
    return _sort_on_host(x, descending) if is_on_host else _sort_in_torch(x, descending)


def _sort_in_torch(x: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    values, order = x.sort(dim=-1, descending=descending, stable=True)
    return values, order


def _sort_on_host(x: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    """By NumPy, which sorts integers several times faster than torch sorts anything.

    Of each number its bits, put in the order of the integers, then its index.
    """
    bits = (x + 0.0).view(torch.int32)  # there is no -0 after that
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of negative numbers, the larger the smaller
    keys = ((~bits if descending else bits).long() << 32) | torch.arange(x.shape[-1], device=x.device)
    keys.numpy().sort(axis=-1)
    order = keys & 0xFFFFFFFF
    return x.gather(-1, order), order
