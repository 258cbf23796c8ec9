"""Rules for denoising heads: joint distributions of the tokens that they emit, against plain decoding."""

from __future__ import annotations

import functools
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.acceptance.denoising import CSpD, LastStep, Reflection, SharedNoise, reflect
from mmspec.acceptance.rejection import SpeculativeSampling
from mmspec.decoding.denoising import Denoising, DenoisingProcess, log_likelihood
from mmspec.decoding.interfaces import AcceptanceRule
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.decoding.vector_sampling import DenoisingSampler
from mmspec.drafters.vectors import VectorModelDrafter
from mmspec.errors import InputError
from tests.targets.test_continuous import ALARM, PROMPTS, ROWS, SIZE, FanOut, decode, statistics, tiny

STEPS = 3


@dataclass
class ToyProcess(DenoisingProcess):
    """Chains that move to the condition's mean in equal parts, with noise."""

    mean: Tensor
    std: Tensor
    steps: int = STEPS
    size: int = SIZE
    is_noisy: bool = True
    has_fixed_noise: bool = True

    def transition(self, x: Tensor, step: int) -> tuple[Tensor, Tensor]:
        return x + (self.mean - x) * (step + 1) / self.steps, self.std * (1 + step) / 2

    def transitions(self, states: Tensor) -> tuple[Tensor, Tensor]:
        both = [self.transition(states[:, step], step) for step in range(self.steps)]
        mean, std = zip(*both, strict=True)
        return torch.stack(mean, 1), torch.stack(std, 1)

    def select(self, rows: Tensor) -> ToyProcess:
        return replace(self, mean=self.mean[rows], std=self.std[rows])


@dataclass
class ToyHead:
    """Head whose conditions are the mean and log deviation of a `tiny` model.

    Attributes:
        fixed: whether deviations are the same for all conditions.
    """

    fixed: bool

    def process(
        self, condition: Tensor, unconditional: Tensor | None, scale: Any, temperature: Any, schedule: Any
    ) -> ToyProcess:
        mean, log_std = condition.chunk(2, -1)
        std = torch.full_like(mean, 0.5) if self.fixed else log_std.exp()
        return ToyProcess(mean, std * temperature, has_fixed_noise=self.fixed)


def sampler(fixed: bool) -> Any:
    return DenoisingSampler(source=ToyHead(fixed), schedule=None)


@functools.cache
def drafter(sampling: str = "sampled", change: float = 0.4, fixed: bool = True) -> VectorModelDrafter:
    model: Any = FanOut(tiny(change))
    model.denoiser = ToyHead(fixed)
    return VectorModelDrafter(model, 2, sampling)


@functools.cache
def plain(fixed: bool, seed: int = 100) -> Tensor:
    """[ROWS, LENGTH, SIZE] by plain decoding."""
    canvas = decode([PROMPTS[0]] * ROWS, sampler=sampler(fixed), seed=seed)
    return torch.stack(canvas.outputs())


def distance(one: Tensor, other: Tensor) -> float:
    """Kolmogorov-Smirnov distance of two samples of equal size."""
    values = torch.cat([one, other]).sort().values
    ranks = [torch.searchsorted(each.sort().values, values, right=True) for each in (one, other)]
    return float((ranks[0] - ranks[1]).abs().max()) / len(one)


def distribution_holds(rule: AcceptanceRule, fixed: bool, change: float) -> None:
    """Assert that speculative decoding has the joint distribution of plain decoding with other noise."""
    canvas = decode([PROMPTS[0]] * ROWS, drafter("sampled", change, fixed), rule, sampler(fixed), seed=3)
    found, expected = statistics(torch.stack(canvas.outputs())), statistics(plain(fixed))
    alarm = (torch.tensor(2 / ALARM).log() / ROWS).sqrt()
    for name, values in found.items():
        assert distance(values, expected[name]) < alarm, name
    assert 0.05 < sum(canvas.stats.accepted) / sum(canvas.stats.drafted) < 0.95


RULES = {
    "whole chain": (SpeculativeSampling, True, 0.2),
    "whole chain, other deviations": (SpeculativeSampling, False, 0.2),
    "reflection": (Reflection, True, 0.4),
    "last step": (LastStep, False, 0.4),
    "CSpD without its biases": (CSpD, False, 0.4),
}


@pytest.mark.parametrize("name", RULES)
def test_joint_distribution_is_that_of_plain_decoding(name: str) -> None:
    rule, fixed, change = RULES[name]
    distribution_holds(rule(), fixed, change)


def at_mean(mean: float, rows: int, steps: int = 1) -> Denoising:
    """[rows, 1] chains of one number: N(mean, 1) where there is one step."""
    condition = torch.tensor([[[mean, 2.0]]])
    return Denoising(OneNumber(steps), None, condition.expand(rows, 1, 2), None, 1.0, 1.0)


@dataclass
class OneNumber:
    """Head of chains of one number; its conditions are means and twice the deviation of the last step."""

    steps: int

    def process(self, condition: Tensor, *others: Any) -> ToyProcess:
        mean, std = condition.chunk(2, -1)
        return ToyProcess(mean, std / self.steps, self.steps, 1)


def chains_of_one_number(shift: float = 0.5, rows: int = 40_000) -> tuple[Tensor, float]:
    """Values of N(0, 1) by `judge` and `finish` of drafts of N(shift, 1), and how many were accepted."""
    random, place = RandomStream.from_seed(0, rows), torch.zeros(rows, 1, dtype=torch.long)
    p, q = at_mean(0.0, rows), at_mean(shift, rows)
    x, q = q.candidate(random, place, Purpose.DRAFT)
    u = random.uniform(place, Purpose.ACCEPT, 1, torch.float32)[..., 0]
    _, passes = p.judge(x, q, u)
    first = torch.zeros(rows, dtype=torch.long)
    accepted, value, open_ = passes[:, 0], x[:, 0], ~passes[:, 0]
    for round_ in range(60):
        if not open_.any():
            break
        purpose = torch.full_like(first, Purpose.RESIDUAL)
        drawn, filled = p.at(first).finish(q.at(first), open_, random.during(round_), first, purpose)
        value = torch.where((open_ & filled)[:, None], drawn, value)
        open_ = open_ & ~filled
    assert not open_.any(), "places stay open"
    return value[:, 0], float(accepted.float().mean())


def one_number_is_exact() -> None:
    """Assert acceptance 1 - TV = 2 Phi(-1/4) and the standard normal distribution."""
    value, accepted = chains_of_one_number()
    assert abs(accepted - 0.8026) < 0.008
    expected = torch.special.ndtr(value.sort().values)
    ranks = torch.arange(1, len(value) + 1) / len(value)
    assert (ranks - expected).abs().max() < 1.95 / len(value) ** 0.5  # one in a thousand


def test_one_number_is_exact() -> None:
    one_number_is_exact()


def test_ratios_of_drafts_have_mean_one() -> None:
    """E over q of p / q is 1; a ratio of densities at two different chains has another mean."""
    rows = 50_000
    random, place = RandomStream.from_seed(1, rows), torch.zeros(rows, 1, dtype=torch.long)
    _, q = at_mean(0.2, rows, 3).candidate(random, place, Purpose.DRAFT)
    chains = q.drawn.flatten(0, 1)  # type: ignore[union-attr]
    p = at_mean(0.0, rows, 3).process
    ratio = (log_likelihood(p, chains) - log_likelihood(q.process, chains)).exp()
    assert abs(ratio.mean() - 1) < 4 * ratio.std() / rows**0.5


def test_reflection_couples_as_well_as_can_be_and_keeps_the_distribution() -> None:
    """One step in two dimensions: acceptance 2 Phi(-|D| / 2); coordinates, and numbers along D and across."""
    rows, gap = 50_000, torch.tensor([0.8, -0.6])
    p, q = (Denoising(TwoNumbers(), None, mean.expand(rows, 1, 2), None, 1.0, 1.0) for mean in (0 * gap, gap))
    random, place = RandomStream.from_seed(2, rows), torch.zeros(rows, 1, dtype=torch.long)
    x, q = q.candidate(random, place, Purpose.DRAFT)
    kept, mirrored = reflect(p, q, random.uniform(place, Purpose.ACCEPT, 1, torch.float32))
    expected = float(2 * torch.special.ndtr(torch.tensor(-0.5)))
    error = (expected * (1 - expected) / rows) ** 0.5
    assert abs(float(kept.float().mean()) - expected) < 3 * error
    values = torch.where(kept, x, mirrored[:, :, 0])[:, 0].double()
    ranks = torch.arange(1, rows + 1) / rows
    for direction in ([1.0, 0.0], [0.0, 1.0], [0.8, -0.6], [0.6, 0.8]):
        along = (values @ torch.tensor(direction).double()).sort().values
        assert (ranks - torch.special.ndtr(along)).abs().max() < 1.95 / rows**0.5  # one in a thousand


class TwoNumbers:
    """Head of vectors of two numbers with deviation 1 around its condition, in one step."""

    def process(self, condition: Tensor, *others: Any) -> ToyProcess:
        return ToyProcess(condition, 2 * torch.ones_like(condition), 1, 2)


def test_shared_noise_without_tolerance_is_plain_decoding() -> None:
    prompts = [PROMPTS[0]] * 40
    expected = decode(prompts, sampler=sampler(True)).outputs()
    for sampling in ("coupled", "sampled"):
        canvas = decode(prompts, drafter(sampling), SharedNoise(), sampler(True))
        assert all(torch.equal(*pair) for pair in zip(canvas.outputs(), expected, strict=True))


def test_a_tolerance_saves_forwards_and_moves_values_little() -> None:
    prompts = [PROMPTS[0]] * 200
    expected = torch.stack(decode(prompts, sampler=sampler(True)).outputs())
    forwards, drifts = [], []
    for tolerance in (0.0, 1.0, 9.0):
        canvas = decode(prompts, drafter("coupled"), SharedNoise(tolerance), sampler(True))
        forwards.append(sum(canvas.stats.accepted))
        drifts.append(float((torch.stack(canvas.outputs()) - expected).square().mean().sqrt()))
    assert forwards[0] < forwards[1] < forwards[2] and drifts[0] == 0 < drifts[1] < drifts[2]


def test_rules_refuse_heads_that_they_are_not_exact_for() -> None:
    """Densities of a step without noise; one deviation where target and draft have two."""
    without = replace(
        sampler(True).source.process(torch.zeros(1, 2 * SIZE), None, 1.0, 1.0, None), is_noisy=False
    )
    with pytest.raises(InputError, match="noise"):
        log_likelihood(without, torch.zeros(1, STEPS + 1, SIZE))
    with pytest.raises(InputError, match="deviations"):
        decode([PROMPTS[0]], drafter(), Reflection(), sampler(False))
