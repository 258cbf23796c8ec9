"""Distributions of vectors with a density in closed form: samples, densities, exact rejection."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch.distributions import Categorical, Independent, MixtureSameFamily, Normal

from mmspec.decoding.distribution import Analytic, Gaussian, GaussianMixture
from mmspec.decoding.random_stream import Purpose, RandomStream

ROWS = 200_000
ALARM = math.sqrt(math.log(2 / 0.001) / 2 / ROWS)  # of Kolmogorov and Smirnov, one in a thousand
MIXTURE = ([0.2, -0.5, 0.4], [[-1.0], [0.5], [2.0]], [[0.4], [1.2], [0.3]])
WORSE = ([0.2, 0.5, -0.4], [[-0.8], [0.3], [1.5]], [[0.6], [1.0], [0.8]])


def normal(mean: float, std: float = 1.0) -> Gaussian:
    return Gaussian(torch.tensor([[[mean]]]), torch.tensor([[[std]]]))


def mixture(logits: list[float], mean: list[list[float]], std: list[list[float]]) -> GaussianMixture:
    return GaussianMixture(*(torch.tensor(each)[None, None] for each in (logits, mean, std)))


def below(one: Analytic, x: Tensor) -> Tensor:
    """Cumulative distribution of one number [M] at x [M]."""
    if isinstance(one, Gaussian):
        return torch.special.ndtr((x - one.mean) / one.std).flatten()
    assert isinstance(one, GaussianMixture)
    parts = torch.special.ndtr((x[:, None] - one.mean[0, 0, :, 0]) / one.std[0, 0, :, 0])
    return (one.logits[0, 0].softmax(-1) * parts).sum(-1)


def departure(one: Analytic, values: Tensor) -> float:
    """Kolmogorov-Smirnov distance of numbers [M] from a distribution."""
    ranks = torch.arange(1, len(values) + 1) / len(values)
    return float((ranks - below(one, values.double().sort().values)).abs().max())


def by_rejection(p: Analytic, q: Analytic, seed: int, rows: int = ROWS) -> tuple[Tensor, float]:
    """Values of p by candidates of q, round by round until no place is open, and how many were accepted."""
    random, place = RandomStream.from_seed(seed, rows), torch.zeros(rows, 1, dtype=torch.long)
    both = [one._map(lambda each: each.expand(rows, *each.shape[1:])) for one in (p, q)]
    x, judged_by = both[1].candidate(random, place, Purpose.DRAFT)
    u = random.uniform(place, Purpose.ACCEPT, 1, torch.float32)[..., 0]
    _, passes = both[0].judge(x, judged_by, u)
    values, is_open = x[:, 0, 0].clone(), torch.nonzero(~passes[:, 0])[:, 0]
    for round_ in range(2_000):
        if not len(is_open):
            return values, float(passes.float().mean())
        stream = RandomStream(random.keys[is_open], round=round_)
        first = torch.zeros_like(is_open)
        own, other = (type(one)(*(each[is_open] for each in one.parameters)).at(first) for one in both)
        judged, purpose = torch.ones_like(first, dtype=torch.bool), torch.full_like(first, Purpose.RESIDUAL)
        drawn, filled = own.finish(other, judged, stream, first, purpose)
        values[is_open[filled]] = drawn[filled, 0]
        is_open = is_open[~filled]
    raise AssertionError("places stay open")


def rejection_is_exact(p: Analytic, q: Analytic) -> float:
    """Assert the distribution of p; return the acceptance."""
    values, accepted = by_rejection(p, q, seed=0)
    assert departure(p, values) < ALARM
    return accepted


def test_normal_numbers_are_accepted_as_often_as_they_can_be() -> None:
    accepted = rejection_is_exact(normal(0.0), normal(0.5))
    assert accepted == pytest.approx(0.803, abs=0.005)  # 2 Phi(-1 / 4)


def test_distributions_that_nearly_agree_leave_no_place_open() -> None:
    accepted = rejection_is_exact(normal(0.0), normal(0.02))
    assert accepted == pytest.approx(0.992, abs=0.001)  # 2 Phi(-1 / 100)


def test_mixtures_are_exact() -> None:
    p, q = mixture(*MIXTURE), mixture(*WORSE)
    x = torch.linspace(-8, 8, 20_001)[:, None, None]
    overlap = torch.minimum(*(one.log_density(x).exp() for one in (p, q))).sum() * 16 / 20_000
    assert rejection_is_exact(p, q) == pytest.approx(float(overlap), abs=0.005)


def test_samples_and_densities_of_a_mixture() -> None:
    rows = 50_000
    one = mixture(*MIXTURE)._map(lambda each: each.expand(rows, *each.shape[1:]))
    place = torch.zeros(rows, 1, dtype=torch.long)
    values = one.sample(RandomStream.from_seed(0, rows), place, Purpose.TARGET)
    assert values.shape == (rows, 1, 1)
    assert departure(mixture(*MIXTURE), values.flatten()) < 1.95 / rows**0.5  # one in a thousand
    generator = torch.Generator().manual_seed(0)
    logits, mean, std = (
        torch.randn(shape, generator=generator) for shape in [(4, 3, 5), (4, 3, 5, 2), (4, 3, 5, 2)]
    )
    parts = Independent(Normal(mean, std.exp()), 1)
    expected = MixtureSameFamily(Categorical(logits=logits), parts)
    x = torch.randn(4, 3, 2, generator=generator)
    ours = GaussianMixture(logits, mean, std.exp())
    torch.testing.assert_close(ours.log_density(x), expected.log_prob(x))
    flat, chosen = ours.flat(), ours.at(torch.tensor([0, 2, 1, 0]))
    torch.testing.assert_close(flat.log_density(x.flatten(0, 1)), ours.log_density(x).flatten())
    torch.testing.assert_close(chosen.log_density(x[:, 1]), at(ours, x))


def at(ours: GaussianMixture, x: Tensor) -> Tensor:
    """Log densities of x[:, 1] at nodes 0, 2, 1, 0."""
    nodes = enumerate((0, 2, 1, 0))
    parts = (GaussianMixture(*(each[row, node] for each in ours.parameters)) for row, node in nodes)
    return torch.stack([part.log_density(x[row, 1]) for row, part in enumerate(parts)])


def test_one_component_is_a_normal_distribution() -> None:
    x = torch.randn(7, 1, 1, generator=torch.Generator().manual_seed(0))
    one = mixture([3.0], [[0.4]], [[0.7]])
    torch.testing.assert_close(one.log_density(x), normal(0.4, 0.7).log_density(x))
    assert one.is_finite().all() and not mixture([math.nan], [[0.4]], [[0.7]]).is_finite().any()
