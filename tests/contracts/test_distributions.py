"""Distributions that every exact rule samples in the loop, by pairs of tokens, with a table as the target.

Rows of one batch have keys of their own, so 20,000 rows are 20,000 independent samples. `distributions.py`
computes the alarm threshold.
"""

from __future__ import annotations

import pytest
import torch

from mmspec.core.draft import DraftKind
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.plain import NoDrafter
from mmspec.core.sampling import Sampler
from mmspec.trees.matching import SampleAndMatch
from mmspec.trees.rejection import KSequential, RecursiveRejection, SpeculativeSampling
from tests.contracts.distributions import (
    ALARM,
    SAMPLES,
    check_distribution,
    chi_square,
    reference_distribution,
)
from tests.contracts.running import decode
from tests.contracts.toy import TableTarget, dirichlet, toy_distribution, toy_target
from tests.oracles import RandomTreeDrafter, SampledTreeDrafter

IID, WITHOUT = DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT
PAIRS: dict[str, tuple[AcceptanceRule, Drafter]] = {
    "plain": (SampleAndMatch(), NoDrafter()),
    "match-random-trees": (SampleAndMatch(), RandomTreeDrafter(9, 6)),
    "speculative-chain": (SpeculativeSampling(), SampledTreeDrafter(toy_distribution(), (1, 1, 1), IID)),
    "recursive-without": (RecursiveRejection(), SampledTreeDrafter(toy_distribution(), (3, 2), WITHOUT)),
    "k-sequential": (KSequential(), SampledTreeDrafter(toy_distribution(), (3, 2), IID)),
}


@pytest.mark.parametrize("name", ["plain", "match-random-trees"])  # checks.py has the others
def test_neighbouring_pairs_follow_the_targets_distribution(name: str) -> None:
    rule, drafter = PAIRS[name]
    check_distribution(toy_target(), drafter, rule, Sampler(temperature=1.0))


@pytest.mark.parametrize(
    ("name", "sampler"),  # test_rules.py has temperature 0.8 with top-k for every exact rule
    [
        ("speculative-chain", Sampler(temperature=1.5)),
        ("recursive-without", Sampler(temperature=0.5)),
        ("speculative-chain", Sampler(temperature=1.0, top_p=0.8)),
        ("k-sequential", Sampler(temperature=0.6, top_k=4, min_p=0.1)),
    ],
    ids=["hot", "cold", "top-p", "all at once"],
)
@pytest.mark.every(2)
def test_the_distribution_is_the_warped_one(name: str, sampler: Sampler) -> None:
    rule, drafter = PAIRS[name]
    check_distribution(toy_target(), drafter, rule, sampler)


@pytest.mark.parametrize("name", ["speculative-chain", "recursive-without"])
@pytest.mark.every(2)
def test_guidance_of_three_combines_logits_before_everything_else(name: str) -> None:
    rule, drafter = PAIRS[name]
    sampler = Sampler(temperature=1.0, top_k=4, guidance_scale=3.0)
    check_distribution(toy_target(tables=2), drafter, rule, sampler, prompts=((0, 2), (1, 4)))


@pytest.mark.parametrize("name", ["speculative-chain", "recursive-without", "k-sequential"])
def test_a_draft_distribution_equal_to_the_targets_is_accepted_whole(name: str) -> None:
    rule, drafter = PAIRS[name]
    assert isinstance(drafter, SampledTreeDrafter)
    distribution = dirichlet(6, 6, seed=9)
    target = TableTarget(distribution.log()[None, None].expand(1, 6, 6, 6))  # [b] whatever came before
    equal = SampledTreeDrafter(distribution, drafter.widths, drafter.kind)
    run = decode(target, [(1, 2)] * 500, equal, rule, Sampler(1.0), max_new_tokens=9)
    assert min(run.from_draft(1)) == len(drafter.widths)


def test_the_first_place_is_accepted_with_the_overlap_of_the_distributions() -> None:
    """Mean accepted = sum of min(p, q) within four sigma, for every token that may stand before."""
    target, q, sampler = toy_target(), toy_distribution(), Sampler(temperature=1.0)
    drafter = SampledTreeDrafter(q, (1,), IID)
    run = decode(target, [(1, 2)] * SAMPLES, drafter, SpeculativeSampling(), sampler, max_new_tokens=3)
    first = torch.tensor(run.emissions[0].tokens)[:, 0]
    taken = torch.tensor(run.from_draft(1)).double()
    p = reference_distribution(target.logits[0, 2][None], sampler)  # [V, V]: after 2 and the first token
    overlap = torch.minimum(p, q).sum(-1)
    for token in range(6):
        here = taken[first == token]
        sigma = (overlap[token] * (1 - overlap[token]) / len(here)).sqrt()
        gap = (here.mean() - overlap[token]).abs()
        assert gap <= 4 * sigma, f"after token {token}: {here.mean():.4f} is not {overlap[token]:.4f}"


def test_the_test_itself_is_calibrated() -> None:
    """For draws from the distribution itself, 5 % of the p-values are below 5 %, within four sigma."""
    distribution = dirichlet(36, seed=3)
    draws = torch.distributions.Multinomial(SAMPLES, distribution)
    torch.manual_seed(0)
    values = [chi_square(draws.sample(), distribution).p_value for _ in range(400)]
    low = sum(value < 0.05 for value in values) / 400
    assert abs(low - 0.05) < 4 * (0.05 * 0.95 / 400) ** 0.5 and min(values) > ALARM


def test_a_vocabulary_of_one_says_the_one_thing() -> None:
    for name in ("match-random-trees", "speculative-chain", "recursive-without", "k-sequential"):
        rule, drafter = PAIRS[name]
        if isinstance(drafter, SampledTreeDrafter):
            drafter = SampledTreeDrafter(torch.ones(1, 1, dtype=torch.float64), (1, 1), drafter.kind)
        else:
            drafter = RandomTreeDrafter(5, 1)
        run = decode(toy_target(vocabulary=1), [(0, 0)] * 3, drafter, rule, Sampler(1.0), max_new_tokens=7)
        assert run.outputs == [[0] * 7] * 3, name
