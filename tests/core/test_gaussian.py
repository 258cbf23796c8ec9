"""Normal distributions of vectors: samples, densities, exact rejection."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Independent, Normal

from mmspec.core.distributions import Gaussian
from mmspec.core.random_stream import Purpose, RandomStream

ROWS = 200_000
ALARM = math.sqrt(math.log(2 / 0.001) / 2 / ROWS)  # of Kolmogorov and Smirnov, one in a thousand


def departure(one: Gaussian, values: Tensor) -> float:
    """Kolmogorov-Smirnov distance of numbers [M] from a distribution."""
    ranks = torch.arange(1, len(values) + 1) / len(values)
    below = torch.special.ndtr((values.double().sort().values - one.mean[0]) / one.std[0]).flatten()
    return float((ranks - below).abs().max())


def by_rejection(p: Gaussian, q: Gaussian) -> tuple[Tensor, float]:
    """Sample p by rejection of candidates of q; return the values and the share of accepted candidates."""
    random, place = RandomStream.from_seed(0, ROWS), torch.zeros(ROWS, 1, dtype=torch.long)
    x, judged_by = q.candidate(random, place, Purpose.DRAFT)
    u = random.uniform(place, Purpose.ACCEPT, 1, torch.float32)[..., 0]
    passes = u.log() <= p.log_ratio(x, judged_by)
    values, is_open = x[:, 0, 0].clone(), torch.nonzero(~passes[:, 0])[:, 0]
    for round_ in range(2_000):
        if not len(is_open):
            return values, float(passes.float().mean())
        first, stream = torch.zeros_like(is_open), RandomStream(random.keys[is_open], round=round_)
        own, other = (Gaussian(one.mean[is_open], one.std[is_open]).at(first) for one in (p, q))
        judged, purpose = torch.ones_like(first, dtype=torch.bool), torch.full_like(first, Purpose.RESIDUAL)
        drawn, filled = own.finish(other, judged, stream, first, purpose)
        values[is_open[filled]] = drawn[filled, 0]
        is_open = is_open[~filled]
    raise AssertionError("places stay open")


@pytest.mark.parametrize(
    ("shift", "std", "due", "error"),
    [
        (1.0, 2.0, 0.803, 0.005),  # 2 Phi(-1 / 4)
        (0.04, 2.0, 0.992, 0.001),  # 2 Phi(-1 / 100): nearly all are accepted, and no place is left open
    ],
)
def test_rejection_is_exact_and_accepts_as_often_as_it_can(
    shift: float, std: float, due: float, error: float
) -> None:
    whole = torch.ones(ROWS, 1, 1)
    p, q = Gaussian(0 * whole, std * whole), Gaussian(shift * whole, std * whole)
    values, accepted = by_rejection(p, q)
    assert departure(p[:1].at(torch.zeros(ROWS, dtype=torch.long)), values) < ALARM
    assert accepted == pytest.approx(due, abs=error)


def test_samples_and_densities_are_those_of_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    mean, std, x = torch.randn(3, 4, 3, 2, generator=generator)
    ours, expected = Gaussian(mean, std.exp()), Independent(Normal(mean, std.exp()), 1).log_prob(x)
    torch.testing.assert_close(ours.log_density(x), expected)
    torch.testing.assert_close(ours.flat().log_density(x.flatten(0, 1)), expected.flatten())
    nodes = torch.tensor([0, 2, 1, 0])
    torch.testing.assert_close(
        ours.at(nodes).log_density(x[torch.arange(4), nodes]), expected[torch.arange(4), nodes]
    )
    rows = 50_000
    one = Gaussian(torch.full((rows, 1, 1), 0.4), torch.full((rows, 1, 1), 0.7))
    place = torch.zeros(rows, 1, dtype=torch.long)
    values = one.sample(RandomStream.from_seed(0, rows), place, Purpose.TARGET)
    assert values.shape == (rows, 1, 1)
    assert departure(one.at(place[:, 0]), values.flatten()) < 1.95 / rows**0.5  # one in a thousand
    assert one.is_finite().all() and not Gaussian(mean, mean / 0).is_finite().any()
