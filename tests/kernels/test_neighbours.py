"""Mass of neighbours: equal to adding by hand; kernels equal to torch, where sums meet the limit too."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.kernels import nearby_mass, nearby_prefix, neighbours
from tests.contracts.toy import dirichlet

Both = Callable[..., tuple[Any, Any]]
UNIT = 2**-12  # masses are multiples of it, so that every sum is exact in float32


def random_table(size: int, count: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.rand(size, size, generator=generator).argsort(-1)[:, :count].short()


def prefix_by_hand(p: Sequence[float], ids: Sequence[int], limit: float) -> tuple[float, int]:
    """c_{m*}(x) and m*: the sum stops at the first neighbour that does not fit."""
    total = 0.0
    for count, neighbour in enumerate(ids):
        if total + p[neighbour] > limit:
            return total, count
        total += p[neighbour]
    return total, len(ids)


@pytest.mark.parametrize(("syntax", "cached"), [(0, 2**20), (3, 1)])
def test_the_mass_of_a_prefix_equals_adding_by_hand(
    syntax: int, cached: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Additive and multiplicative limits; the sum is empty (m* = 0) where the first neighbour is too much."""
    monkeypatch.setattr(neighbours, "CACHED_ELEMENTS", cached)
    size, count = 17, 6
    p = dirichlet(2, 3, size + syntax, seed=4, concentration=0.2)
    table = random_table(size, count)
    x = torch.arange(size + syntax).expand(p.shape)
    empty = 0
    for limits in (torch.full_like(p, 0.1), torch.full_like(p[..., :1], 0.02), 4 * p, None):
        ceiling = torch.full_like(p, 2.0) if limits is None else limits.expand_as(p)
        dense = nearby_mass(p, table, limits)
        mass, added = nearby_prefix(p, table, x, limits)
        torch.testing.assert_close(mass, dense, rtol=0, atol=1e-14)
        for place in torch.cartesian_prod(torch.arange(2), torch.arange(3)).tolist():
            p_row, top = p[tuple(place)].tolist(), ceiling[tuple(place)].tolist()
            for token in range(size + syntax):
                ids = table[token].tolist() if token < size else []
                expected, number = prefix_by_hand(p_row, ids, top[token])
                assert abs(float(dense[(*place, token)]) - expected) < 1e-14
                assert int(added[(*place, token)]) == number
                empty += token < size and expected == 0
    assert empty > 50, "the edge m* = 0 was met"


def dyadic(*shape: int, syntax: int = 0, seed: int = 1) -> Tensor:
    """[..., V] masses with exact sums, many of them zero; around each row lies NaN."""
    generator = torch.Generator().manual_seed(seed)
    counts = torch.randint(0, 40, shape, generator=generator) - 8
    guarded = torch.full((shape[0], *(size + 2 for size in shape[1:])), float("nan"))
    inner = guarded[..., 1:-1, 1:-1] if len(shape) > 2 else guarded[..., 1:-1]
    inner.copy_(counts.clamp_min(0) * UNIT)
    return inner


def guarded_table(size: int, count: int) -> Tensor:
    """A table between columns of ids that no kernel may add."""
    wide = torch.zeros(size, count + 2, dtype=torch.int16)
    wide[:, 1:-1] = random_table(size, count)
    return wide[:, 1:-1]


# [places..., V], K codes, k neighbours: nothing to add; no syntax; a batch of places; several blocks of each
SMALL = [((2, 3, 20), 17, 6)]
CASES = [((1, 1), 1, 0), ((2, 5), 5, 4), *SMALL, ((2, 3, 135), 33, 32), ((35, 9), 7, 5)]


def kernels_add_as_torch_does(both: Both, device: torch.device, cases: Sequence[Any] = CASES) -> None:
    """Sums are exact: a neighbour that just fits must be added by both, and one that does not, by none."""
    for shape, size, count in cases:
        p, table = dyadic(*shape).to(device), guarded_table(size, count).to(device)
        tokens = 3 if shape[0] < 35 else 1
        x = torch.randint(shape[-1], (*shape[:-1], tokens), generator=torch.Generator().manual_seed(2))
        x[..., 0] = shape[-1] - 1  # a syntax token, if there are any
        x = x.to(device)
        one = torch.full_like(p[..., :1], 60 * UNIT)
        for limit, at_x in ((None, None), (one, one), (3 * p, 3 * p.gather(-1, x))):
            kernel, twin = both(nearby_mass, p, table, limit)
            assert torch.equal(kernel, twin), (shape, limit is None)
            kernel, twin = both(nearby_prefix, p, table, x, at_x)
            assert torch.equal(kernel[0], twin[0]) and torch.equal(kernel[1], twin[1]), shape


@pytest.mark.slow
def test_kernels_equal_torch_on_exact_sums(both: Both, device: torch.device) -> None:
    kernels_add_as_torch_does(both, device)


def test_neighbours_may_fill_several_blocks(
    both: Both, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As the 1000 of LANTERN would; sums go on from block to block."""
    pytest.importorskip("triton")
    monkeypatch.setattr("mmspec.kernels.neighbours.MAX_BLOCK", 4)
    kernels_add_as_torch_does(both, device, SMALL)


def test_kernels_equal_torch_on_any_masses(both: Both, device: torch.device) -> None:
    p = dirichlet(3, 50, seed=1, concentration=0.3).float().to(device)
    table = random_table(48, 20).to(device)
    x = torch.arange(50, device=device).expand(3, -1)
    for limit in (None, torch.full_like(p, 0.1234), 4.321 * p):
        kernel, twin = both(nearby_mass, p, table, limit)
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=1e-7)
        kernel, twin = both(nearby_prefix, p, table, x, limit)
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=1e-7)
