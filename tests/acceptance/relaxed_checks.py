"""Checks of relaxed rules, as functions."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.acceptance import ACCEPTANCE_RULES
from mmspec.acceptance.relaxed_sampling import RelaxedSampling, total_variation
from mmspec.decoding.distribution import Scores
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.interfaces import AcceptanceRule
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.kernels import rank_ratio
from tests.acceptance.codes import fitted
from tests.acceptance.exact_distribution import (
    Outcome,
    edge_distributions,
    exact_distribution,
    point_distribution,
)
from tests.contracts import distributions
from tests.contracts.running import decode
from tests.contracts.toy import dirichlet, toy_distribution, toy_target
from tests.oracles import SampledTreeDrafter

POINT, IID, WITHOUT = DraftKind.POINT, DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT
VOCABULARY = 6
ROUNDING = 1e-9


def rule_of(name: str, vocabulary: int = VOCABULARY, syntax: int = 0, **options: object) -> AcceptanceRule:
    return fitted(ACCEPTANCE_RULES[name](**options), vocabulary, syntax)  # type: ignore[call-arg]


def random_distributions(
    count: int = 20, vocabulary: int = VOCABULARY, seed: int = 5
) -> tuple[Tensor, Tensor]:
    """p and q; a third of p's tokens are excluded, as by top-k, and some of q's."""
    p, q = dirichlet(2, count, vocabulary, seed=seed)
    excluded = p.argsort(-1) < vocabulary // 3
    p = p.masked_fill(excluded, 0.0)
    q[::2] = q[::2].masked_fill(q[::2] < 0.05, 0.0)
    return p / p.sum(-1, keepdim=True), q / q.sum(-1, keepdim=True)


def budgets(delta: float) -> list[AcceptanceRule]:
    return [
        rule_of("budget", delta=delta, neighbours=2),
        rule_of("budget", delta=delta, neighbours=3, syntax=1, metric="cosine"),
        rule_of("budget", delta=delta, relaxation="groups", group_size=3),
        rule_of("budget", delta=delta, relaxation="omega"),
    ]


def budgets_hold(deltas: Sequence[float] = (0.05, 0.2, 0.6)) -> None:
    """TV = s O <= delta and acceptance = 1 - TV(p, q) + s O, by the rule's own decisions."""
    for p, q in (random_distributions(), edge_distributions()):
        for delta in deltas:
            for rule in budgets(delta):
                if rule.relaxation == "neighbours" and p.shape[-1] != VOCABULARY:  # type: ignore[attr-defined]
                    continue
                outcome = exact_distribution(rule, p, q, 1, IID)
                distance = total_variation(outcome.output, p)
                assert (distance <= delta + ROUNDING).all(), f"{rule}: {distance.max()}"
                torch.testing.assert_close(outcome.tv, distance, rtol=0, atol=ROUNDING)
                exact = torch.minimum(p, q).sum(-1)
                torch.testing.assert_close(outcome.acceptance, exact + distance, rtol=0, atol=ROUNDING)


def siblings_share_the_budget(delta: float = 0.2) -> None:
    """Two siblings, three where they are deterministic, spend one delta between them."""
    p, q = random_distributions(4)
    tokens = torch.randint(VOCABULARY, (16, 3), generator=torch.Generator().manual_seed(1))
    spent = 0.0
    for rule in budgets(delta):
        for kind in (IID, WITHOUT):
            spent = max(spent, check_spent(rule, exact_distribution(rule, p, q, 2, kind), p, delta))
        points = p.repeat(4, 1)
        spent = max(spent, check_spent(rule, point_distribution(rule, points, tokens), points, delta))
    assert spent > 0.9 * delta, "the budget is used"


def check_spent(rule: AcceptanceRule, outcome: Outcome, p: Tensor, delta: float) -> float:
    distance = total_variation(outcome.output, p)
    assert outcome.tv is not None
    assert (distance <= outcome.tv + ROUNDING).all(), f"{rule}: less is reported than was done"
    assert (outcome.tv <= delta + ROUNDING).all(), f"{rule}: {outcome.tv.max()} was spent"
    return float(distance.max())


def lantern_removes_little(delta: float = 0.15) -> None:
    """One deterministic candidate, and only the neighbours that were added leave: TV <= delta everywhere."""
    p = random_distributions(60)[0]
    tokens = torch.arange(VOCABULARY).repeat(10)[:, None]
    for rule in (rule_of("lantern", delta=delta), rule_of("lantern", delta=delta, syntax=2, neighbours=2)):
        outcome = point_distribution(rule, p, tokens)
        distance = total_variation(outcome.output, p)
        assert distance.max() > 0.5 * delta, "neighbours were aggregated"
        assert (distance <= delta + ROUNDING).all(), f"{rule}: {distance.max()}"
        torch.testing.assert_close(outcome.tv, distance, rtol=0, atol=ROUNDING)


def groups_accept_at_least_the_exact_mass(count: int = 1000, vocabulary: int = 32) -> None:
    """Triangle inequality, which holds for partitions; x is in its own group."""
    for size in (3, 7):
        p, q = random_distributions(count, vocabulary, seed=size)
        for draft in (q, 0.9 * p + 0.1 * q, 0.8 * p + 0.2 * p.roll(1, -1)):
            accepted = draft * rank_ratio(p, draft, size)
            assert (accepted <= draft).all()
            exact = torch.minimum(p, draft).sum(-1)
            assert (accepted.sum(-1) >= exact - ROUNDING).all(), "less than the exact rule accepts"


def excluded_tokens_stay_excluded() -> None:
    """Nothing that the target excludes is ever emitted, whatever was drafted."""
    p, q = random_distributions(4)
    every, points = torch.arange(VOCABULARY).repeat(4)[:, None], p.repeat_interleave(VOCABULARY, 0)
    for name, rule in relaxed_rules():
        for outcome, target in (
            (exact_distribution(rule, p, q, 2, WITHOUT), p),
            (point_distribution(rule, points, every), points),
        ):
            assert (outcome.output[target == 0] == 0).all(), f"{name} emits what the target excludes"


def relaxed_rules() -> list[tuple[str, AcceptanceRule]]:
    """Every relaxed rule as it is meant to be used, fitted."""
    rules = [(f"budget {rule}", rule) for rule in budgets(0.3)]
    rules += [(name, rule_of(name)) for name in ("lantern", "lantern++", "grouped", "cool")]
    clusters = rule_of("grouped", partition="codebook", group_size=2)
    return [
        *rules,
        ("grouped by code", clusters),
        ("lantern of one", rule_of("lantern", delta=1, neighbours=1)),
    ]


def reference_rules() -> list[tuple[str, AcceptanceRule]]:
    return [
        ("released LANTERN", rule_of("lantern", reference=True, neighbours=2)),
        ("released LANTERN++", rule_of("lantern", reference=True, neighbours=1, lam=2.0, syntax=1)),
        ("released GSD", rule_of("grouped", reference=True)),
    ]


def acceptance_is_paid_for() -> None:
    """Acceptance - (1 - TV(p, q)) <= TV(output, p) for every rule, and the reported TV is the true one."""
    p, q = random_distributions()
    exact = torch.minimum(p, q).sum(-1)
    for name, rule in (*relaxed_rules(), *reference_rules()):
        assert isinstance(rule, RelaxedSampling)
        outcome = exact_distribution(rule, p, q, 1, IID)
        distance = total_variation(outcome.output, p)
        assert (outcome.acceptance - exact <= distance + ROUNDING).all(), name
        torch.testing.assert_close(outcome.tv, distance, rtol=0, atol=ROUNDING, msg=f"{name} misreports")


def loops_stay_within_the_budget(delta: float = 0.1, samples: int = 10_000) -> None:
    """The second token's distribution in the loop, given the first, is within delta of the target's.

    With n samples the measured total variation exceeds the true one by at most half the sum of the standard
    deviations on average, and by a further 2 / sqrt(n) with probability e^-8 (McDiarmid).
    """
    target, sampler = toy_target(), Sampler(temperature=1.0)
    for rule, widths, kind in (
        (rule_of("budget", delta=delta, neighbours=2), (1, 1), IID),
        (rule_of("budget", delta=delta, relaxation="omega"), (3,), WITHOUT),
        (rule_of("budget", delta=delta, relaxation="groups", group_size=2), (3, 2), IID),
    ):
        drafter = SampledTreeDrafter(toy_distribution(), widths, kind)
        run = decode(target, [(1, 2)] * samples, drafter, rule, sampler, max_new_tokens=3, seed=4)
        outputs = torch.tensor(run.outputs)
        p = distributions.reference_distribution(target.logits[0, 2][None], sampler)
        for first in range(VOCABULARY):
            second = outputs[outputs[:, 0] == first, 1]
            share = torch.bincount(second, minlength=VOCABULARY) / len(second)
            noise = (p[first] / len(second)).sqrt().sum() / 2 + 2 / len(second) ** 0.5
            distance = total_variation(share, p[first])
            assert distance <= delta + noise, f"{rule} after token {first}: {distance} > {delta} + {noise}"
        joint = target.joint(
            [(1, 2)], 3, lambda logits: distributions.reference_distribution(logits, sampler)
        )
        shares = torch.bincount(outputs @ torch.tensor([36, 6, 1]), minlength=216) / samples
        noise = (joint / samples).sqrt().sum() / 2 + 2 / samples**0.5
        distance = total_variation(shares, joint.flatten())
        assert distance <= 1 - (1 - delta) ** 2 + noise, f"{rule}, joint distribution of three: {distance}"
        assert 0 < run.stats.tv_max <= delta + 1e-6 and run.stats.tv_places > samples


def trees_report_distances() -> None:
    """Total variations of many relaxed siblings add up to a bound on a distance, so it is at most 1."""
    p, _ = dirichlet(2, 64, VOCABULARY, seed=7)
    scores = Scores(p[:, None].expand(-1, VOCABULARY, -1).log(), False)
    tokens = torch.arange(VOCABULARY).expand(64, -1)
    draft = Draft.tree(tokens, [0] * VOCABULARY, POINT)  # the root and all other tokens
    rule = rule_of("lantern", delta=0.9, neighbours=2, reference=True)  # its residuals leave p
    verdict = rule.verify(draft, scores, RandomStream.from_seed(0, 64), torch.ones(64, dtype=torch.long))
    assert verdict.tv is not None
    assert (verdict.tv <= 1.0).all(), f"{verdict.tv.max()}"
