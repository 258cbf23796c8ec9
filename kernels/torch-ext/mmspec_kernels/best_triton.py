"""Triton kernel of `best.py` and its launcher: a program compares all candidates of a row with each other."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

ELEMENTS = 8192  # comparisons that a program makes at once


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
