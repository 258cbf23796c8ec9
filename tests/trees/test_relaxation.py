"""Relaxed rules keep their bounds and report the variation; planted bugs show that these tests can fail."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.plugins import RULES
from mmspec.trees.relaxed_sampling import RelaxedSampling, total_variation
from tests.contracts import distributions
from tests.contracts.running import decode
from tests.contracts.toy import dirichlet, toy_distribution, toy_target
from tests.core.test_rounds import counted_reads
from tests.oracles import SampledTreeDrafter, next_token, tree_of
from tests.trees.exact_distribution import (
    Outcome,
    edge_distributions,
    exact_distribution,
    point_distribution,
)
from tests.trees.relaxed_checks import (
    ROUNDING,
    VOCABULARY,
    budgets,
    random_distributions,
    relaxed_rules,
    rule_of,
)

IID = DraftKind.IID
WITHOUT = DraftKind.WITHOUT_REPLACEMENT
POINT = DraftKind.POINT
UNFITTED: list[str] = []  # names of rules of a package outside that need a codebook


def test_budgets_hold() -> None:
    """TV = s O <= delta and acceptance = 1 - TV(p, q) + s O, by the rule's own decisions."""
    for p, q in (random_distributions(), edge_distributions()):
        for delta in (0.05, 0.6):
            for rule in budgets(delta):
                if rule.relaxation == "neighbours" and p.shape[-1] != VOCABULARY:  # type: ignore[attr-defined]
                    continue
                outcome = exact_distribution(rule, p, q, 1, IID)
                distance = total_variation(outcome.output, p)
                assert (distance <= delta + ROUNDING).all(), f"{rule}: {distance.max()}"
                torch.testing.assert_close(outcome.tv, distance, rtol=0, atol=ROUNDING)
                exact = torch.minimum(p, q).sum(-1)
                torch.testing.assert_close(outcome.acceptance, exact + distance, rtol=0, atol=ROUNDING)


def test_siblings_share_the_budget() -> None:
    """Two siblings, three where they are deterministic, spend one delta between them."""
    delta = 0.2
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


def test_excluded_tokens_stay_excluded() -> None:
    """Nothing that the target excludes is ever emitted, whatever was drafted."""
    p, q = random_distributions(4)
    every, points = torch.arange(VOCABULARY).repeat(4)[:, None], p.repeat_interleave(VOCABULARY, 0)
    for name, rule in relaxed_rules():
        for outcome, target in (
            (exact_distribution(rule, p, q, 2, WITHOUT), p),
            (point_distribution(rule, points, every), points),
        ):
            assert (outcome.output[target == 0] == 0).all(), f"{name} emits what the target excludes"


def test_acceptance_is_paid_for() -> None:
    """Acceptance - (1 - TV(p, q)) <= TV(output, p) for every rule, and the reported TV is the true one."""
    p, q = random_distributions()
    exact = torch.minimum(p, q).sum(-1)
    for name, rule in relaxed_rules():
        assert isinstance(rule, RelaxedSampling)
        outcome = exact_distribution(rule, p, q, 1, IID)
        distance = total_variation(outcome.output, p)
        assert (outcome.acceptance - exact <= distance + ROUNDING).all(), name
        torch.testing.assert_close(outcome.tv, distance, rtol=0, atol=ROUNDING, msg=f"{name} misreports")


def test_loops_stay_within_the_budget() -> None:
    """The second token's distribution in the loop, given the first, is within delta of the target's.

    With n samples the measured total variation exceeds the true one by at most half the sum of the standard
    deviations on average, and by a further 2 / sqrt(n) with probability e^-8 (McDiarmid).
    """
    delta, samples = 0.1, 10_000
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


def test_trees_report_distances() -> None:
    """Total variations of many relaxed siblings add up to a bound on a distance, so it is at most 1."""
    p, _ = dirichlet(2, 64, VOCABULARY, seed=7)
    scores = Scores(p[:, None].expand(-1, VOCABULARY, -1).log(), False)
    tokens = torch.arange(VOCABULARY).expand(64, -1)
    draft = tree_of(tokens, [0] * VOCABULARY, POINT)  # the root and all other tokens
    rule = rule_of("lantern", delta=0.9, neighbours=2)  # its residuals leave p
    _, tv = rule.measure(draft, scores, RandomStream.from_seed(0, 64), torch.ones(64, dtype=torch.long))
    assert (tv <= 1.0).all(), f"{tv.max()}"


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("budget", {"relaxation": "tokens"}),
        ("budget", {"group_size": 0}),
        ("lantern++", {"lam": float("nan")}),
        ("grouped", {"group_size": True}),
        ("suffix", {"confidence": 1.5}),
        ("typical", {"epsilon": -0.1}),
        ("top_beta", {"beta": 0}),
        ("lantern", {"delta": 1.1}),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, options: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        RULES[name](**options)
    assert caught.value.argument == next(iter(options))


def test_a_rule_that_was_not_fitted_says_so() -> None:
    draft = Tree.chain(torch.zeros(1, 2, dtype=torch.long), IID, Categorical(torch.full((1, 1, 4), 0.25)))
    random, emitted = RandomStream.from_seed(0, 1), torch.ones(1, dtype=torch.long)
    for name in ("budget", "lantern", *UNFITTED):
        with pytest.raises(TypeError, match="fit"):
            RULES[name]().verify(draft, Scores(torch.zeros(1, 2, 4), False), random, emitted)


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("budget", 1), ("budget", 4), ("lantern", 1), ("lantern++", 4), ("grouped", 1), ("suffix", 1)],
)
def test_single_precision_and_a_draft_of_nothing_are_no_exception(name: str, nodes: int) -> None:
    rule = rule_of(name)
    p, q = (values.float().view(20, nodes, 6) for values in random_distributions(20 * nodes))
    draft = Tree.chain(q.argmax(-1), IID, Categorical(q[:, 1:]))
    path, tv = rule.measure(
        draft, Scores(p.log(), False), RandomStream.from_seed(0, 20), torch.ones(20, dtype=torch.long)
    )
    assert ((p[torch.arange(20), path.accepted].gather(1, next_token(path)[:, None])) > 0).all()
    if name == "budget":
        assert (tv <= 0.1 + 1e-6).all()


def test_no_rule_makes_the_host_wait_for_the_device() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (values.view(5, 4, 6) for values in random_distributions(20))
    tokens = torch.randint(6, (5, 4), generator=generator)
    random, emitted = RandomStream.from_seed(0, 5), torch.ones(5, dtype=torch.long)
    for name, rule in (*relaxed_rules(), ("suffix", rule_of("suffix"))):
        for kind in rule.sound_for:
            draft_q = None if kind is DraftKind.POINT else Categorical(q[:, 1:])
            for parents in ([0, 0, 1, 2], *([] if rule.chains_only else [[0, 0, 0, 1]])):
                draft = tree_of(tokens, parents, kind, draft_q)
                with counted_reads() as reads:
                    rule.verify(draft, Scores(p.log(), False), random, emitted)
                assert not reads, f"{name}, {kind.value}, {parents}: {dict(reads)}"
