"""Relaxed rules: they keep their bounds, report what they do, and the tests of that can fail."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mmspec.acceptance import ACCEPTANCE_RULES
from mmspec.acceptance.budget import Budget
from mmspec.decoding.distribution import Categorical, Scores
from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.random_stream import RandomStream
from mmspec.errors import InputError
from tests.acceptance import relaxed_checks as checks
from tests.decoding.test_rounds import counted_reads

IID = DraftKind.IID
CHECKS = [
    checks.lantern_removes_little,
    checks.trees_report_distances,
    checks.siblings_share_the_budget,
    checks.budgets_hold,
    checks.loops_stay_within_the_budget,
    checks.groups_accept_at_least_the_exact_mass,
    checks.excluded_tokens_stay_excluded,
    checks.acceptance_is_paid_for,
]


@pytest.mark.parametrize("check", CHECKS)
def test_what_must_hold_holds(check: Callable[[], None]) -> None:
    check()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("budget", {"relaxation": "tokens"}),
        ("budget", {"neighbours": 0}),
        ("budget", {"metric": "l1"}),
        ("budget", {"group_size": 0}),
        ("lantern", {"lam": 1.0}),
        ("lantern", {"neighbours": 2.5}),
        ("lantern++", {"lam": float("nan")}),
        ("grouped", {"group_size": True}),
        ("grouped", {"partition": "colour"}),
        ("cool", {"omega": 0.9}),
        ("cool", {"nu": -1.0}),
        ("suffix", {"confidence": 1.5}),
    ],
)
def test_a_setting_out_of_range_is_named(name: str, options: dict[str, object]) -> None:
    with pytest.raises(InputError) as caught:
        ACCEPTANCE_RULES[name](**options)
    assert caught.value.argument == next(iter(options))


def test_rules_say_what_they_promise() -> None:
    assert [Budget(delta).promise for delta in (0.0, 0.1, 0.25)] == ["exact", "tv<=0.1", "tv<=0.25"]
    assert (Budget.exactness, Budget.bound) == ("bounded", "TV at most delta per token")
    for name in ("lantern", "lantern++", "grouped", "cool", "suffix"):
        assert ACCEPTANCE_RULES[name]().promise == "lossy"


def test_a_rule_that_was_not_fitted_says_so() -> None:
    draft = Draft.chain(torch.zeros(1, 2, dtype=torch.long), IID, Categorical(torch.full((1, 2, 4), 0.25)))
    random, emitted = RandomStream.from_seed(0, 1), torch.ones(1, dtype=torch.long)
    for name, options in (
        ("budget", {}),
        ("lantern", {}),
        ("grouped", {"reference": True}),
        ("grouped", {"partition": "codebook"}),
    ):
        with pytest.raises(TypeError, match="fit"):
            ACCEPTANCE_RULES[name](**options).verify(
                draft, Scores(torch.zeros(1, 2, 4), False), random, emitted
            )


@pytest.mark.parametrize(
    ("name", "nodes"),
    [("budget", 1), ("budget", 4), ("lantern", 1), ("lantern++", 4), ("grouped", 1), ("cool", 4)]
    + [("suffix", 1)],
)
def test_single_precision_and_a_draft_of_nothing_are_no_exception(name: str, nodes: int) -> None:
    rule = checks.rule_of(name)
    p, q = (values.float().view(20, nodes, 6) for values in checks.random_distributions(20 * nodes))
    draft = Draft.chain(q.argmax(-1), IID, Categorical(q))
    verdict = rule.verify(
        draft, Scores(p.log(), False), RandomStream.from_seed(0, 20), torch.ones(20, dtype=torch.long)
    )
    assert ((p[torch.arange(20), verdict.accepted].gather(1, verdict.next_token[:, None])) > 0).all()
    if name == "budget":
        assert verdict.tv is not None and (verdict.tv <= 0.1 + 1e-6).all()


def test_no_rule_makes_the_host_wait_for_the_device() -> None:
    generator = torch.Generator().manual_seed(0)
    p, q = (values.view(5, 4, 6) for values in checks.random_distributions(20))
    tokens = torch.randint(6, (5, 4), generator=generator)
    random, emitted = RandomStream.from_seed(0, 5), torch.ones(5, dtype=torch.long)
    for name, rule in (
        *checks.relaxed_rules(),
        *checks.reference_rules(),
        ("suffix", checks.rule_of("suffix")),
    ):
        for kind in rule.sound_for:
            draft_q = None if kind is DraftKind.POINT else Categorical(q)
            for parents in ([0, 0, 1, 2], *([] if rule.chains_only else [[0, 0, 0, 1]])):
                draft = Draft.tree(tokens, parents, kind, draft_q)
                with counted_reads() as reads:
                    rule.verify(draft, Scores(p.log(), False), random, emitted)
                assert not reads, f"{name}, {kind.value}, {parents}: {dict(reads)}"
