"""The best of scored candidates, in an order that does not depend on the device.

A program of the kernel compares all candidates of a row with each other.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton

MAX_CANDIDATES = 4096  # that the kernel compares, each with each
ELEMENTS = 8192  # comparisons that a program makes at once


@operator(
    fake=lambda scores, count, ascending=False: scores.new_empty(
        len(scores), min(count, scores.shape[1]), dtype=torch.int64
    )
)
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
        return best_triton(scores, count, ascending)
    index = scores.sort(dim=-1, descending=True, stable=True).indices[:, :count]
    return index.sort(-1).values if ascending else index.contiguous()


@launcher
def best_triton(scores: Tensor, count: int, ascending: bool) -> Tensor:
    """Launch `best`: scores [B, m] -> [B, count] int64."""
    rows, size = scores.shape
    count = min(count, size)
    index = torch.empty(rows, count, dtype=torch.int64, device=scores.device)
    if index.numel():
        width = max(16, triton.next_power_of_2(size))
        block = max(1, min(width, ELEMENTS // width))
        _best_kernel[(rows,)](
            scores.contiguous(), index, size, count, ASCENDING=ascending, SIZE=width, BLOCK=block, num_warps=8
        )
    return index


@triton.jit
def _best_kernel(
    scores_ptr, index_ptr, size, count, ASCENDING: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    scores_ptr += row * size
    own = tl.arange(0, SIZE)
    mine = tl.load(scores_ptr + own, mask=own < size, other=0.0).to(tl.float32)
    mine_nan = mine != mine
    rank = tl.zeros([SIZE], tl.int32)  # how many candidates come before
    for start in range(0, size, BLOCK):
        other = start + tl.arange(0, BLOCK)
        theirs = tl.load(scores_ptr + other, mask=other < size, other=0.0).to(tl.float32)
        theirs_nan = theirs != theirs
        higher = (theirs[None, :] > mine[:, None]) | (theirs_nan[None, :] & ~mine_nan[:, None])
        equal = (theirs[None, :] == mine[:, None]) | (theirs_nan[None, :] & mine_nan[:, None])
        before = higher | (equal & (other[None, :] < own[:, None]))
        rank += tl.sum((before & (other < size)[None, :]).to(tl.int32), 1)
    chosen = (rank < count) & (own < size)
    place = rank
    if ASCENDING:
        place = tl.cumsum(chosen.to(tl.int32), 0) - 1
    tl.store(index_ptr + row * count + place, own.to(tl.int64), mask=chosen)
