"""Top-k selection and stable sorting along the last dimension."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from .backend import launcher, operator, tl, triton, use_triton

__all__ = ["largest", "sort_stably"]


def largest(x: Tensor, counts: Sequence[int]) -> Tensor:
    """Find the k largest of numbers [..., V]; k is the maximum of some counts from 1 to V.

    Returns:
        [..., k]; for each count the count-th largest is at index count - 1, the others in any order.
    """
    is_on_host = x.device.type == "cpu" and x.dtype == torch.float32
    return _largest_on_host(x, counts) if is_on_host else _largest_in_torch(x, counts)


def _largest_in_torch(x: Tensor, counts: Sequence[int]) -> Tensor:
    return x.topk(max(counts), dim=-1).values


def _largest_on_host(x: Tensor, counts: Sequence[int]) -> Tensor:
    """In NumPy, which is several times faster than torch."""
    values = (-x).numpy()
    values.partition(sorted({count - 1 for count in counts}), axis=-1)
    return -torch.from_numpy(values[..., : max(counts)])


def sort_stably(x: Tensor, descending: bool = False) -> tuple[Tensor, Tensor]:
    """Values and indices of `Tensor.sort(stable=True)` for numbers [..., V] without NaN."""
    is_on_host = x.device.type == "cpu" and x.dtype == torch.float32
    return _sort_on_host(x, descending) if is_on_host else _sort_in_torch(x, descending)


def _sort_in_torch(x: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    values, order = x.sort(dim=-1, descending=descending, stable=True)
    return values, order


def _sort_on_host(x: Tensor, descending: bool) -> tuple[Tensor, Tensor]:
    """In NumPy, which sorts integers several times faster than torch sorts.

    The sorted integers combine the bits of a number, mapped to a monotonic order, with its index.
    """
    bits = (x + 0.0).view(torch.int32)  # turns -0 into 0
    bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)  # reverses the order of negative numbers
    keys = ((~bits if descending else bits).long() << 32) | torch.arange(x.shape[-1], device=x.device)
    keys.numpy().sort(axis=-1)
    order = keys & 0xFFFFFFFF
    return x.gather(-1, order), order


MAX_CANDIDATES = 4096  # limit of the kernel, which compares all pairs
ELEMENTS = 8192  # comparisons per step of a program


@operator(
    fake=lambda scores, count, ascending=False: scores.new_empty(
        len(scores), min(count, scores.shape[1]), dtype=torch.int64
    )
)
def best(scores: Tensor, count: int, ascending: bool = False) -> Tensor:
    """Find the highest scores of each row; ties prefer the lower index.

    Args:
        scores: [B, m]; NaN counts as the highest.
        count: number of scores, limited to m.
        ascending: whether to return indices in increasing order, instead of from the highest score down.

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
    rank = tl.zeros([SIZE], tl.int32)  # number of candidates that come before
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
