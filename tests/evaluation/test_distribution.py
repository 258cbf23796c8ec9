"""Tests of sampled tokens and images: correct samples pass, and every planted bias is found."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.accelerators import build_accelerator
from mmspec.core.sampling import Sampler
from mmspec.evaluation.identity.distribution import (
    ALARM,
    BINS,
    CRITICAL,
    DistributionTest,
    check_distribution,
    energy_test,
    mass_before,
    read_distributions,
)
from tests.methods.staircase_checks import SAMPLED, draw, lines, rasters, requests_of, zipar

GUIDED = Sampler(0.8, top_k=12, guidance_scale=2.0)


def test_the_mass_before_a_token_counts_likelier_ones_and_is_uniform_for_draws() -> None:
    distribution = torch.tensor([[0.1, 0.4, 0.4, 0.1]], dtype=torch.float64).expand(4, 4)
    got = mass_before(distribution, torch.arange(4), torch.tensor([0.5, 0.0, 1.0, 0.5], dtype=torch.float64))
    assert got.tolist() == pytest.approx([0.85, 0.0, 0.8, 0.95])  # and a share of its own
    one, two, three = (torch.Generator().manual_seed(seed) for seed in range(3))
    distribution = torch.rand(20_000, 9, generator=two, dtype=torch.float64) ** 3
    distribution /= distribution.sum(-1, keepdim=True)
    tokens = distribution.multinomial(1, generator=three)[:, 0]
    values = mass_before(distribution, tokens, torch.rand(20_000, generator=one, dtype=torch.float64))
    gap = (values.sort().values - torch.linspace(0, 1, 20_000, dtype=torch.float64)).abs().max()
    assert gap < 2.5 / 20_000**0.5  # Kolmogorov-Smirnov: 7e-6 beyond 2.5


@pytest.mark.parametrize("sampler", [SAMPLED, GUIDED])
def test_distributions_of_a_finished_output_are_those_of_its_prefixes(sampler: Sampler) -> None:
    target = rasters()
    (request,) = requests_of(target, 1)
    ((output,), _) = draw(target, build_accelerator("none"), [request], sampler)
    distributions = read_distributions(target, sampler, request, output)
    for place in (0, 1, 9, 15):
        alone = read_distributions(target, sampler, request, output[: place + 1])[place]
        torch.testing.assert_close(distributions[place], alone)


def is_taken_for_plain(target: Any, accelerator: Any, sampler: Sampler, count: int) -> bool:
    requests = requests_of(target, count)
    outputs, _ = draw(target, accelerator, requests, sampler)
    test = check_distribution(target, SAMPLED, requests, outputs)
    assert test.places == count * target.grid.cells  # its syntax is left out
    return test.passed


@pytest.mark.parametrize("build", [rasters, lines])
def test_plain_decoding_passes_with_its_syntax_left_out(build: Any) -> None:
    assert is_taken_for_plain(build(), build_accelerator("none"), SAMPLED, 30)


BIASES = {
    "temperature 0.7 for 0.9": Sampler(0.7, top_k=12, top_p=0.95),
    "top-k of 6": Sampler(0.9, top_k=6, top_p=0.95),
    "no top-k": Sampler(0.9),
    "guided": Sampler(0.9, top_k=12, top_p=0.95, guidance_scale=1.5),
}


@pytest.mark.parametrize("name", BIASES)
@pytest.mark.every(2)
def test_another_distribution_is_found_out(name: str) -> None:
    assert not is_taken_for_plain(rasters(), build_accelerator("none"), BIASES[name], 100)


def test_zipar_is_found_out() -> None:
    assert not is_taken_for_plain(rasters(), zipar(1), SAMPLED, 40)


def test_the_resolution_is_what_the_chi_square_can_see() -> None:
    half = torch.tensor([(BINS - 1) / 2, CRITICAL / 2], dtype=torch.float64)
    assert torch.special.gammaincc(half[0], half[1]).item() == pytest.approx(ALARM, rel=0.02)
    few, many = DistributionTest(1000, 0, 0.5, 0.0), DistributionTest(4000, 0, 0.5, 0.0)
    assert few.resolution == pytest.approx(2 * many.resolution) == pytest.approx(0.105, abs=0.001)


IMAGES, PLACES, SIZE = 48, 16, 4


def images(seed: int, like: float = 0.0) -> Tensor:
    """Vectors of unit deviation; neighbours are correlated by `like`."""
    noise = torch.randn(IMAGES, PLACES, SIZE, generator=torch.Generator().manual_seed(seed))
    values = noise.clone()
    for place in range(1, PLACES):
        values[:, place] = like * values[:, place - 1] + (1 - like**2) ** 0.5 * noise[:, place]
    return values


def test_two_samples_of_one_distribution_pass_and_others_are_found() -> None:
    found = [energy_test(images(seed), images(100 + seed)) for seed in range(8)]
    assert all(test.passed for test in found)
    assert min(test.p_value for test in found) < 0.6, "the p-values spread"
    assert not energy_test(images(0) + 0.5, images(1)).passed
    neighbours_agree = energy_test(images(0, like=0.9), images(1))  # where every marginal is right
    assert not neighbours_agree.passed and neighbours_agree.places == 2 * IMAGES * PLACES
