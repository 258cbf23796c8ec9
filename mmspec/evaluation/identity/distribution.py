"""Tests of sampled outputs against the distribution that an exact rule promises.

A rule with its own noise outputs other tokens than plain decoding, with the same distribution. One forward
pass over a finished output returns the conditional distribution of each token, against which the tokens are
tested. Images of continuous tokens have no such distributions. They are compared with images of plain
decoding in a two-sample test by energy distance (Székely & Rizzo, 2004).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.draft import DraftKind, Tree
from mmspec.core.image_grid import FREE
from mmspec.core.interfaces import Request, list_prompts
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.targets import AnyTarget

__all__ = [
    "DistributionTest",
    "SampleTest",
    "check_distribution",
    "energy_test",
    "mass_before",
    "read_distributions",
]

BINS = 20
ALARM = 1e-6  # a correct accelerator fails once in half a million checks
CRITICAL = 63.68  # a chi-square of 19 degrees of freedom exceeds it with probability 1e-6
LARGEST_SURPRISAL = 5.0  # standard deviations; two-sided 6e-7
SAMPLE_ALARM = 1e-3  # of the two-sample test
PERMUTATIONS = 4999
FEATURES = 32


@dataclass(frozen=True)
class DistributionTest:
    """Outcome of a test of sampled tokens.

    Attributes:
        places: number of tested tokens.
        impossible: number of tokens with probability 0 under the target.
        p_value: p-value of a chi-square test on `mass_before`, which is uniform if every token was drawn from
            its distribution.
        surprisal: deviation of the mean of -log p(x) from the mean entropy, in standard deviations; below 0
            if the tokens are likelier than they should be.
    """

    places: int
    impossible: int
    p_value: float
    surprisal: float

    def __str__(self) -> str:
        return f"p = {self.p_value:.2g}, z = {self.surprisal:+.1f}"

    @property
    def resolution(self) -> float:
        """Total variation of `mass_before` to uniform that the test detects about every other time.

        A chi-square on n values rises by at least 4 n times its square. This is the best case, since some
        biases do not change `mass_before`.
        """
        return math.sqrt((CRITICAL - (BINS - 1)) / (4 * self.places))

    @property
    def passed(self) -> bool:
        return not self.impossible and self.p_value > ALARM and abs(self.surprisal) < LARGEST_SURPRISAL


@torch.inference_mode()
def read_distributions(
    target: AnyTarget, sampler: Sampler, request: Request, output: Sequence[int]
) -> Tensor:
    """Conditional distributions [N, V] of the N tokens of an output, from one forward pass over it."""
    prompts = list_prompts([request], sampler)
    capacity = max(prompt["input_ids"].shape[1] for prompt in prompts) + len(output)
    state, prefill = target.prefill(prompts, capacity)
    logits = prefill.logits
    if len(output) > 1:
        draft = Tree.chain(torch.tensor([list(output[:-1])], device=target.device), DraftKind.POINT)
        logits = torch.cat([logits, target.score(state, draft).logits], dim=1)
    return sampler.scores(sampler.guided(logits)).p[0]


def mass_before(distribution: Tensor, tokens: Tensor, u: Tensor) -> Tensor:
    """Probability mass [N] of the tokens that are likelier than x, plus a share u of x's own.

    This is the probability integral transform (Rosenblatt, 1952) with tokens ordered by probability. For any
    distributions [N, V] and uniforms u [N], the numbers are independent and uniform if every token of
    tokens [N] was drawn from its distribution.
    """
    own = distribution.gather(1, tokens[:, None])
    earlier = torch.arange(distribution.shape[1], device=distribution.device) < tokens[:, None]
    likelier = (distribution > own) | ((distribution == own) & earlier)
    return (distribution * likelier).sum(-1) + u * own[:, 0]


def check_distribution(
    target: AnyTarget,
    sampler: Sampler,
    requests: Sequence[Request],
    outputs: Sequence[Sequence[int]],
    seed: int = 0,
) -> DistributionTest:
    """Test sampled outputs, one per request, against the distribution of the target and the sampler.

    Forced tokens are left out; `seed` keys the uniforms of `mass_before`.

    Raises:
        InputError: fewer than 100 tokens, or greedy decoding, which has no distribution to test.
    """
    if sampler.greedy:
        rule = "must be above 0: greedy decoding has no distribution to test"
        raise InputError("temperature", sampler.temperature, rule)
    generator = torch.Generator().manual_seed(seed)
    spread, excess, variance, impossible = [], 0.0, 0.0, 0
    for row, (request, output) in enumerate(zip(requests, outputs, strict=True)):
        settings = sampler.part([row])
        distribution = read_distributions(target, settings, request, output).double().cpu()
        free = [
            place
            for place in range(len(output))
            if request.layout is None or request.layout.forced[place] == FREE
        ]
        distribution, tokens = distribution[free], torch.tensor(output)[free]
        own = distribution.gather(1, tokens[:, None])[:, 0]
        impossible += int((own == 0).sum())
        surprisal = -distribution.clamp_min(torch.finfo(distribution.dtype).tiny).log()
        entropy = (distribution * surprisal).sum(-1)
        excess += float((surprisal.gather(1, tokens[:, None])[:, 0] - entropy).sum())
        variance += float(((distribution * surprisal**2).sum(-1) - entropy**2).sum())
        spread.append(
            mass_before(
                distribution, tokens, torch.rand(len(free), generator=generator, dtype=distribution.dtype)
            )
        )
    values = torch.cat(spread)
    if len(values) < 5 * BINS:
        rule = f"must have at least {5 * BINS} tokens that are not forced; increase the number of samples"
        raise InputError("samples", len(values), rule)
    counts = torch.histc(values.clamp(0, 1), BINS, 0, 1)
    expected = len(values) / BINS
    statistic = ((counts - expected) ** 2 / expected).sum()
    half = torch.tensor([(BINS - 1) / 2, float(statistic) / 2], dtype=torch.float64)
    p_value = float(torch.special.gammaincc(half[0], half[1]))
    return DistributionTest(len(values), impossible, p_value, excess / math.sqrt(max(variance, 1e-12)))


@dataclass(frozen=True)
class SampleTest:
    """Outcome of a two-sample test of images.

    Attributes:
        places: number of vectors in both samples.
        distance: energy distance between the features of the images.
        p_value: share of random permutations with at least this distance.
    """

    places: int
    distance: float
    p_value: float

    def __str__(self) -> str:
        return f"p = {self.p_value:.2g}"

    @property
    def passed(self) -> bool:
        return self.p_value > SAMPLE_ALARM


def energy_test(one: Tensor, other: Tensor, seed: int = 0) -> SampleTest:
    """Test two samples of images [n, N, d] by the energy distance of random features, with permutations.

    Features are random projections of an image's vectors and of the products of neighbouring vectors. The
    products detect a method that keeps every marginal and changes the dependence between vectors.
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
