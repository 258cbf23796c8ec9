"""Ratios of groups: kernels equal torch, among equally likely tokens too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.kernels import rank_ratio, rank_ratio_at

Both = Callable[..., tuple[Any, Any]]
UNIT = 2**-10  # masses are multiples of it, so that every sum is exact in float32


def dyadic(*shape: int, seed: int) -> Tensor:
    """[..., V] masses with exact sums, many of them equal or zero; around each row lies NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 12, shape, generator=generator) - 2
    guarded = torch.full((shape[0], *(size + 2 for size in shape[1:])), float("nan"))
    inner = guarded[..., 1:-1, 1:-1] if len(shape) > 2 else guarded[..., 1:-1]
    inner.copy_(counts.clamp_min(0) * UNIT)
    return inner


def masses(*shape: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """p and q, which share no strides; every other zero of p is negative."""
    p, q = dyadic(*shape, seed=1), dyadic(*shape, seed=2)
    every_other = torch.arange(shape[-1]) % 2 == 0
    p.copy_(torch.where((p == 0) & every_other, -0.0, p))
    return p.to(device), q.contiguous().to(device)


def some_tokens(*shape: int, device: torch.device) -> Tensor:
    """[..., m] tokens: all where there is one place, else two a place, of which one is the last."""
    if len(shape) == 2 and shape[0] == 1:
        return torch.arange(shape[-1], device=device)[None]
    x = torch.randint(shape[-1], (*shape[:-1], 2), generator=torch.Generator().manual_seed(3))
    x[..., 0] = shape[-1] - 1
    return x.to(device)


def ranks_agree(both: Both, device: torch.device, cases: tuple[tuple[Any, ...], ...]) -> None:
    for shape, size in cases:
        p, q = masses(*shape, device=device)
        kernel, twin = both(rank_ratio, p, q, size)
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=0)
        kernel, twin = both(rank_ratio_at, p, q, some_tokens(*shape, device=device), size)
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=0)


SMALL_RANKS = (((1, 23), 5), ((2, 2, 11), 3))
RANKS = (((1, 1), 1), ((2, 7), 1), *SMALL_RANKS, ((3, 19), 14), ((2, 40), 33))


def test_kernels_by_rank_equal_torch(both: Both, device: torch.device) -> None:
    ranks_agree(both, device, RANKS)


def test_candidates_of_several_tiles_are_merged(
    both: Both, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Like a vocabulary of 184,622 in tiles of 4096, with a partial last tile."""
    monkeypatch.setattr("mmspec.kernels.groups.TILE", 8)
    ranks_agree(both, device, SMALL_RANKS)
