"""The two-sample test of images finds what it should, and nothing else."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.evaluation.identity.distribution import energy_test

IMAGES, PLACES, SIZE = 48, 16, 4


def images(seed: int, like: float = 0.0) -> Tensor:
    """Vectors of unit deviation; neighbours are correlated by `like`."""
    noise = torch.randn(IMAGES, PLACES, SIZE, generator=torch.Generator().manual_seed(seed))
    values = noise.clone()
    for place in range(1, PLACES):
        values[:, place] = like * values[:, place - 1] + (1 - like**2) ** 0.5 * noise[:, place]
    return values


def test_two_samples_of_one_distribution_pass() -> None:
    found = [energy_test(images(seed), images(100 + seed)) for seed in range(8)]
    assert all(test.passed for test in found)
    assert min(test.p_value for test in found) < 0.6, "the p-values spread"


def test_another_mean_is_found() -> None:
    assert not energy_test(images(0) + 0.5, images(1)).passed


def test_neighbours_that_agree_are_found_where_every_marginal_is_right() -> None:
    test = energy_test(images(0, like=0.9), images(1))
    assert not test.passed and test.places == 2 * IMAGES * PLACES
