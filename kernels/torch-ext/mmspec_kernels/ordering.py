"""Stable sorting of the last dimension."""

from __future__ import annotations

import torch
from torch import Tensor

__all__ = ["sort_stably"]


def sort_stably(x: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Sort numbers [..., V] as `Tensor.sort(stable=True)`, where they are not NaN; values and indices.

    On the CPU by NumPy, which sorts integers several times faster than torch sorts anything: of each number
    its bits, put in the order of the integers, then its index.
    """
    if x.device.type != "cpu" or x.dtype != torch.float32:
        values, order = x.sort(dim=-1, descending=descending, stable=True)
        return values, order
    bits = (x + 0.0).view(torch.int32)  # there is no -0 after that
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # of negative numbers, the larger the smaller
    keys = ((~bits if descending else bits).long() << 32) | torch.arange(x.shape[-1])
    keys.numpy().sort(axis=-1)
    order = keys & 0xFFFFFFFF
    return x.gather(-1, order), order
