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


# [places..., V], K codes, k neighbours: nothing to add; no syntax; a batch of places; several blocks of each


def test_kernels_equal_torch_on_any_masses(both: Both, device: torch.device) -> None:
    p = dirichlet(3, 50, seed=1, concentration=0.3).float().to(device)
    table = random_table(48, 20).to(device)
    x = torch.arange(50, device=device).expand(3, -1)
    for limit in (None, torch.full_like(p, 0.1234), 4.321 * p):
        kernel, twin = both(nearby_mass, p, table, limit)
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=1e-7)
        kernel, twin = both(nearby_prefix, p, table, x, limit)
        torch.testing.assert_close(kernel, twin, rtol=1e-6, atol=1e-7)
