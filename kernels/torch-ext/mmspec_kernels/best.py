"""The best of scored candidates, in an order that does not depend on the device."""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import operator, use_triton

MAX_CANDIDATES = 4096  # that the kernel compares, each with each


def _fake(scores: Tensor, count: int, ascending: bool = False) -> Tensor:
    return scores.new_empty(len(scores), min(count, scores.shape[1]), dtype=torch.int64)


@operator(fake=_fake)
def best(scores: Tensor, count: int, ascending: bool = False) -> Tensor:
    """Find the highest scores of each row; of equal ones, those that come first.

    Args:
        scores: [B, m]; NaN counts as the highest of all.
        count: how many; all where there are fewer.
        ascending: whether to give the indices in increasing order, and not from the highest score down.

    Returns:
        [B, count] int64 indices.
    """
    if use_triton(scores.device) and scores.shape[1] <= MAX_CANDIDATES and scores.dtype != torch.float64:
        from .best_triton import best_triton

        return best_triton(scores, count, ascending)
    index = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return index.sort(-1).values if ascending else index.contiguous()
