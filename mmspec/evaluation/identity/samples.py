"""Two-sample test of images of continuous tokens, by their energy distance (Székely & Rizzo, 2004)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

__all__ = ["SampleTest", "energy_test"]

ALARM = 1e-3
PERMUTATIONS = 4999
FEATURES = 32


@dataclass(frozen=True)
class SampleTest:
    """Outcome of a two-sample test of images.

    Attributes:
        places: vectors of both samples.
        distance: energy distance of the features of images.
        p_value: share of random divisions at least as far apart.
    """

    places: int
    distance: float
    p_value: float

    def __str__(self) -> str:
        return f"p = {self.p_value:.2g}"

    @property
    def passed(self) -> bool:
        return self.p_value > ALARM


def energy_test(one: Tensor, other: Tensor, seed: int = 0) -> SampleTest:
    """Test two samples of images by the energy distance of random features, with permutations.

    Features are projections of an image's vectors, and of the products of neighbouring ones: a method that
    keeps every marginal and breaks what vectors have in common is found by the latter.

    Args:
        one, other: [n, N, d], [m, N, d].
        seed: of projections and permutations.
    """
    generator = torch.Generator().manual_seed(seed)
    both = torch.cat([one, other]).double()
    parts = []
    for values in (both, both[:, 1:] * both[:, :-1]):
        flat = values.flatten(1)
        flat = (flat - flat.mean(0)) / flat.std(0).clamp_min(1e-9)
        directions = torch.randn(flat.shape[1], FEATURES, generator=generator, dtype=torch.float64)
        parts.append(flat @ directions / flat.shape[1] ** 0.5)
    features = torch.cat(parts, 1)
    distances = torch.cdist(features, features)
    first, total = len(one), len(both)
    orders = torch.stack(
        [torch.arange(total)] + [torch.randperm(total, generator=generator) for _ in range(PERMUTATIONS)]
    )
    signs = torch.full((len(orders), total), -1.0 / (total - first), dtype=torch.float64)
    signs.scatter_(1, orders[:, :first], 1.0 / first)
    energies = -((signs @ distances) * signs).sum(1)
    p_value = float((energies >= energies[0] - 1e-12).double().mean())
    return SampleTest(both.shape[0] * both.shape[1], float(energies[0]), p_value)
