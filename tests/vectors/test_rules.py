"""Rules for denoising heads: joint distributions of the vectors that they emit, against plain decoding."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.core import cache
from mmspec.core.canvas import Stopping, VectorCanvas
from mmspec.core.decoder import Decoder
from mmspec.core.interfaces import AcceptanceRule, Drafter, PromptOutput
from mmspec.core.loop import speculate
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.statistics import DecodingStats
from mmspec.families.nextstep.modeling import NextStepConfig, NextStepForImageGeneration
from mmspec.families.nextstep.target import NextStepTarget
from mmspec.methods.draft_model.vectors import VectorModelDrafter
from mmspec.targets.causal import CausalState
from mmspec.trees.matching import SampleAndMatch
from mmspec.trees.rejection import SpeculativeSampling
from mmspec.vectors.denoising import Denoising, log_likelihood
from mmspec.vectors.rules import CSpD, LastStep, Reflection, SharedNoise, reflect
from mmspec.vectors.sampling import DenoisingSampler
from tests.contracts.running import as_request, fan_out
from tests.vectors.fields import ChainProcess

SIZE, ROWS, LENGTH, STEPS = 2, 3_000, 3, 3
PROMPTS = [[1, 2, 3], [4], [5, 6]]
ALARM = 1e-7  # of some twenty statistics


class FanOut(NextStepTarget):
    """Reads equal prompts once, so that thousands of rows start in a moment.

    Its next vector depends on those before: means of about 1, deviations of about 0.7.

    Args:
        change: how far its weights are from those of the target.
        fixed: whether deviations of its head are the same for all conditions.
    """

    denoiser: Any = None

    def __init__(self, change: float = 0.0, fixed: bool = True) -> None:
        config = NextStepConfig(
            vocab_size=8,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=64,
            latent_size=4,
            latent_patch_size=1,
            latent_channels=SIZE,
            fm_head_dim=8,
            fm_head_layers=1,
            fm_condition_size=2 * SIZE,
        )
        model = NextStepForImageGeneration(config).eval()
        own, other = torch.Generator().manual_seed(0), torch.Generator().manual_seed(1)
        for weight in model.parameters():
            noise = change * torch.randn(weight.shape, generator=other)
            weight.data = 0.35 * (torch.randn(weight.shape, generator=own) + noise)
        model.image_out_projector.bias.data[SIZE:] = -0.4
        super().__init__(model)
        self.denoiser = ToyHead(fixed)

    def prefill(
        self, prompts: Sequence[Mapping[str, Tensor]], capacity: int, taps: Sequence[int] = ()
    ) -> tuple[CausalState, PromptOutput]:
        if len(prompts) <= len(PROMPTS):
            return super().prefill(prompts, capacity, taps)
        rows = len(prompts)
        one, output = super().prefill(prompts[:1], capacity, taps)
        state = replace(
            one,
            cache=fan_out(one.cache, self, rows, capacity),
            offset=one.offset.repeat(rows),
            prompt_lengths=one.prompt_lengths * rows,
            starts=one.starts.repeat(rows),
        )
        return state, PromptOutput(output.logits.expand(rows, -1, -1))


@functools.cache
def target() -> FanOut:
    return FanOut()


def decode(
    prompts: Sequence[Sequence[int]],
    drafter: Drafter | None = None,
    rule: AcceptanceRule | None = None,
    fixed: bool = True,
    length: int = LENGTH,
    seed: int | Sequence[int] = 0,
) -> VectorCanvas:
    """Decode a batch to its end. The defaults are plain sampling."""
    known = {tuple(prompt): as_request(prompt) for prompt in prompts}
    requests = [known[tuple(prompt)] for prompt in prompts]
    rows = [list(prompt) for prompt in prompts]
    canvas = VectorCanvas(rows, Stopping(length), DecodingStats(), target().device, SIZE)
    roles: Any = target(), Decoder(drafter or NoDrafter(), rule or SampleAndMatch()), sampler(fixed)
    pieces: list[list[Tensor]] = [[] for _ in rows]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cache, "CAPACITY_BLOCK", 16)
        for step in speculate(*roles, requests, canvas, RandomStream.from_seed(seed, len(rows))):
            assert canvas.stats.target_forwards < 40, "places stay open for ever"
            for row, new in enumerate(step.emission.tokens):
                pieces[row] += [new] if len(new) else []
    assert all(torch.equal(torch.cat(p), out) for p, out in zip(pieces, canvas.outputs(), strict=True))
    assert canvas.finish_reasons == ["length"] * len(rows)
    return canvas


def statistics(vectors: Tensor) -> dict[str, Tensor]:
    """Numbers of each row whose distributions are compared: coordinates, and products of neighbours."""
    flat = vectors.flatten(1).double()
    found = {f"coordinate {i}": flat[:, i] for i in range(flat.shape[1])}
    for place in range(LENGTH - 1):
        here, after = vectors[:, place].double(), vectors[:, place + 1].double()
        for i in range(SIZE):
            found |= {f"{place}.{i} x {j}": here[:, i] * after[:, j] for j in range(SIZE)}
        found[f"{place}: distance"] = (here - after).norm(dim=-1)
    directions = torch.randn(
        4, flat.shape[1], generator=torch.Generator().manual_seed(1), dtype=torch.float64
    )
    return found | {f"direction {i}": flat @ each for i, each in enumerate(directions)}


@dataclass
class ToyProcess(ChainProcess):
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
    """Head whose conditions are mean and log deviation.

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
    return VectorModelDrafter(FanOut(change, fixed), 2, sampling)


@functools.cache
def plain(fixed: bool, seed: int = 100) -> Tensor:
    """[ROWS, LENGTH, SIZE] by plain decoding."""
    canvas = decode([PROMPTS[0]] * ROWS, fixed=fixed, seed=seed)
    return torch.stack(canvas.outputs())


def distance(one: Tensor, other: Tensor) -> float:
    """Kolmogorov-Smirnov distance of two samples of equal size."""
    values = torch.cat([one, other]).sort().values
    ranks = [torch.searchsorted(each.sort().values, values, right=True) for each in (one, other)]
    return float((ranks[0] - ranks[1]).abs().max()) / len(one)


def distribution_holds(rule: AcceptanceRule, fixed: bool, change: float) -> int:
    """Assert that speculative decoding has the joint distribution of plain decoding with other noise."""
    canvas = decode([PROMPTS[0]] * ROWS, drafter("sampled", change, fixed), rule, fixed, seed=3)
    found, expected = statistics(torch.stack(canvas.outputs())), statistics(plain(fixed))
    alarm = (torch.tensor(2 / ALARM).log() / ROWS).sqrt()
    for name, values in found.items():
        assert distance(values, expected[name]) < alarm, name
    assert 0.05 < sum(canvas.stats.accepted) / sum(canvas.stats.drafted) < 0.95
    return canvas.stats.target_forwards


RULES = {
    "whole chain": (SpeculativeSampling, True, 0.2),
    "whole chain, other deviations": (SpeculativeSampling, False, 0.2),
    "reflection": (Reflection, True, 0.4),
    "CSpD without its biases": (CSpD, False, 0.4),
}


@pytest.mark.parametrize("name", RULES)
@pytest.mark.every(2)
def test_joint_distribution_is_that_of_plain_decoding(name: str) -> None:
    rule, fixed, change = RULES[name]
    distribution_holds(rule(), fixed, change)


def test_rows_of_a_batch_are_rows_alone() -> None:
    together = decode(PROMPTS, drafter(), LastStep(), length=9, seed=[1, 2, 3]).outputs()
    for row, prompt in enumerate(PROMPTS):
        alone = decode([prompt], drafter(), LastStep(), length=9, seed=[row + 1]).outputs()[0]
        torch.testing.assert_close(together[row], alone, rtol=0, atol=1e-4)


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
    """Values of N(0, 1) by `log_ratio` and `finish` of drafts of N(shift, 1), and how many were accepted."""
    random, place = RandomStream.from_seed(0, rows), torch.zeros(rows, 1, dtype=torch.long)
    p, q = at_mean(0.0, rows), at_mean(shift, rows)
    x, q = q.candidate(random, place, Purpose.DRAFT)
    u = random.uniform(place, Purpose.ACCEPT, 1, torch.float32)[..., 0]
    passes = u.log() <= p.log_ratio(x, q)
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


def test_one_number_is_exact() -> None:
    """Acceptance is 1 - TV = 2 Phi(-1/4), the distribution standard normal."""
    value, accepted = chains_of_one_number()
    assert abs(accepted - 0.8026) < 0.008
    expected = torch.special.ndtr(value.sort().values)
    ranks = torch.arange(1, len(value) + 1) / len(value)
    assert (ranks - expected).abs().max() < 1.95 / len(value) ** 0.5  # one in a thousand


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
    expected = decode(prompts).outputs()
    for sampling in ("coupled", "sampled"):
        canvas = decode(prompts, drafter(sampling), SharedNoise())
        assert all(torch.equal(*pair) for pair in zip(canvas.outputs(), expected, strict=True))
