"""LANTERN and GSD as released equal naive loops; GSD over clusters; mmspec's tests of relaxed rules."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.core.distributions import Scores
from mmspec.core.draft import DraftKind
from mmspec.core.random_stream import RandomStream
from mmspec.plugins import RULES
from mmspec.trees.relaxed_sampling import RelaxedSampling
from mmspec_extras.clusters import cluster_codes
from mmspec_extras.methods.released.grouped import ReleasedGrouped, cluster_ratio
from mmspec_extras.methods.released.lantern import ReleasedLantern
from tests.contracts.toy import dirichlet
from tests.methods import slow_rules
from tests.methods.test_lantern import LIMITS
from tests.oracles import next_token, tree_of
from tests.pipelines import test_row_settings
from tests.pipelines.test_row_settings import classes  # noqa: F401
from tests.trees import relaxed_checks as checks
from tests.trees import test_relaxation
from tests.trees.codes import fitted, random_codes
from tests.trees.exact_distribution import exact_distribution, point_distribution

WITHOUT = DraftKind.WITHOUT_REPLACEMENT


@pytest.mark.parametrize(("limit", "siblings"), [("delta", 1), ("delta", 3), ("delta 1", 2), ("lam", 3)])
def test_released_lantern_of_deterministic_siblings_equals_the_loop(limit: str, siblings: int) -> None:
    rule = checks.rule_of("lantern_released", syntax=1, neighbours=2, **LIMITS[limit])
    assert isinstance(rule, ReleasedLantern) and rule.leaving_codes.shape[1] == 3, "k + 1"
    p = checks.random_distributions(40)[0]
    tokens = torch.rand(40, 6, generator=torch.Generator().manual_seed(2)).argsort(-1)[:, :siblings]
    output = point_distribution(rule, p, tokens).output
    for row, (p_row, tuple_) in enumerate(zip(p.tolist(), tokens.tolist(), strict=True)):
        expected = slow_rules.released_lantern(
            p_row, tuple_, None, rule.leaving_codes.tolist(), 2, limit_of(rule)
        )
        torch.testing.assert_close(output[row].tolist(), expected, rtol=0, atol=1e-9)


@pytest.mark.parametrize(("limit", "siblings"), [("delta", 2), ("delta 1", 1), ("lam", 2)])
def test_released_lantern_of_sampled_siblings_equals_the_loop(limit: str, siblings: int) -> None:
    rule = checks.rule_of("lantern_released", syntax=1, neighbours=2, **LIMITS[limit])
    assert isinstance(rule, ReleasedLantern)
    p, q = checks.random_distributions(6)
    output = exact_distribution(rule, p, q, siblings, WITHOUT).output
    for case in range(6):
        draws = draws_without_replacement(q[case].tolist(), siblings)
        expected = torch.zeros(6, dtype=torch.float64)
        for tokens, weight in draws:
            output_of_draw = slow_rules.released_lantern(
                p[case].tolist(), tokens, q[case].tolist(), rule.leaving_codes.tolist(), 2, limit_of(rule)
            )
            expected += weight * torch.tensor(output_of_draw, dtype=torch.float64)
        torch.testing.assert_close(output[case], expected, rtol=0, atol=1e-9)


def limit_of(rule: ReleasedLantern):  # type: ignore[no-untyped-def]
    return lambda p_x: rule.delta if rule.lam is None else (rule.lam - 1) * p_x


def draws_without_replacement(q: list[float], siblings: int) -> list[tuple[list[int], float]]:
    if siblings == 0:
        return [([], 1.0)]
    draws = []
    for x, weight in enumerate(q):
        if weight > 0:
            left = slow_rules.scaled([0.0 if v == x else q[v] for v in range(len(q))], [0.0] * len(q))
            rest = draws_without_replacement(left, siblings - 1)
            draws += [([x, *tokens], weight * other) for tokens, other in rest]
    return draws


def test_released_lantern_at_temperature_zero_takes_what_its_neighbours_make_the_likeliest() -> None:
    """The rule accepts x if p(x) + c(x) is at least the largest probability, and follows the deepest path."""
    rule = fitted(ReleasedLantern(0.5, neighbours=1), 6)
    logits = dirichlet(40, 4, 6, seed=3, concentration=2.0).log()
    tokens = torch.randint(6, (40, 4), generator=torch.Generator().manual_seed(0))
    draft = tree_of(tokens, [0, 0, 0, 2], DraftKind.POINT)
    random = RandomStream.from_seed(0, 40)
    verdict, tv = rule.measure(draft, Scores(logits, True), random, torch.ones(40, dtype=torch.long))
    table, relaxed = rule.nearest.tolist(), 0  # type: ignore[attr-defined]
    for row in range(40):
        p = logits[row].softmax(-1).tolist()

        def passes(node: int, parent: int, row: int = row, p: list[list[float]] = p) -> bool:
            x = int(tokens[row, node])
            raised = p[parent][x] + slow_rules.prefix(p[parent], table[x][:1], 0.5)[0]
            return raised >= max(p[parent])

        first = [node for node in (1, 2) if passes(node, 0)]
        deep = 2 in first and passes(3, 2)
        expected = [2, 3] if deep else first[:1]
        assert verdict.nodes[row, 1 : len(expected) + 1].tolist() == expected
        assert verdict.accepted[row] == len(expected)
        assert next_token(verdict)[row] == logits[row, ([0, *expected])[-1]].argmax()
        relaxed += bool(expected) and int(tokens[row, expected[0]]) != int(logits[row, 0].argmax())
    assert relaxed > 0 and tv.max() == 1


def test_released_groups_equal_the_loop() -> None:
    """Ranks r - 7 to r + 6 with both filters; the lowest seven ranks by the exact rule; p(x) = 0 may pass."""
    vocabulary, syntax = 24, 2
    codes = random_codes(vocabulary, syntax)
    rule = RULES["grouped_released"]().fit(codes)
    assert isinstance(rule, RelaxedSampling)
    p, q = checks.random_distributions(30, vocabulary)
    p = p.masked_fill(p < 0.02, 0.0)
    p, q = p / p.sum(-1, keepdim=True), q.clamp_min(1e-4) / q.clamp_min(1e-4).sum(-1, keepdim=True)
    accepted = rule.mass(p, q, p[:, :1]) / q
    assert codes.codebook is not None
    vectors = codes.codebook.double().tolist()
    expected = [slow_rules.released_groups(*pq, vectors) for pq in zip(p.tolist(), q.tolist(), strict=True)]
    torch.testing.assert_close(accepted, torch.tensor(expected, dtype=p.dtype), rtol=0, atol=1e-9)
    x = torch.tensor([[0, 11, 23]]).expand(30, -1)
    torch.testing.assert_close(rule.mass_at(p, q, x, p[:, :1]), (accepted * q).gather(-1, x))
    assert (accepted[p == 0] > 0).any(), "as released, a token of probability zero may be accepted"
    assert (accepted * q).sum(-1).mean() > torch.minimum(p, q).sum(-1).mean()


def test_clusters_of_codes_hold_near_codes_and_judge_syntax_alone() -> None:
    centres = torch.tensor([[0.0, 0], [9, 0], [0, 9], [9, 9]])
    noise = torch.randn(4, 10, 2, generator=torch.Generator().manual_seed(0))
    cluster = cluster_codes((centres[:, None] + 0.1 * noise).flatten(0, 1), 4)
    assert [len(set(part.tolist())) for part in cluster.split(10)] == [1] * 4 and len(
        set(cluster.tolist())
    ) == 4
    p, q = checks.random_distributions(200, 43)
    accepted = q * cluster_ratio(p, q, cluster)
    assert (accepted.sum(-1) >= torch.minimum(p, q).sum(-1) - 1e-12).all()
    torch.testing.assert_close(accepted[:, 40:], torch.minimum(p, q)[:, 40:], rtol=0, atol=1e-15)


def released_rules() -> list[tuple[str, RelaxedSampling]]:
    made = [
        ("released LANTERN", checks.rule_of("lantern_released", neighbours=2)),
        ("released LANTERN++", checks.rule_of("lantern_released", neighbours=1, lam=2.0, syntax=1)),
        ("released GSD", checks.rule_of("grouped_released")),
    ]
    return [(name, rule) for name, rule in made if isinstance(rule, RelaxedSampling)]


@pytest.mark.parametrize(
    "check",
    [
        test_relaxation.test_acceptance_is_paid_for,
        test_relaxation.test_no_rule_makes_the_host_wait_for_the_device,
    ],
)
def test_they_are_relaxed_rules(check: Callable[[], None], monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = ("grouped by code", checks.rule_of("grouped_codebook", group_size=2))
    monkeypatch.setattr(checks, "MORE", [clusters, *released_rules()])
    check()


def test_clusters_emit_nothing_that_the_target_excludes(monkeypatch: pytest.MonkeyPatch) -> None:
    clusters = ("grouped by code", checks.rule_of("grouped_codebook", group_size=2))
    monkeypatch.setattr(checks, "MORE", [clusters])
    test_relaxation.test_excluded_tokens_stay_excluded()


def test_trees_report_distances() -> None:
    """The total variations of many relaxed siblings add up to a bound on a distance, which is at most 1."""
    p, _ = dirichlet(2, 64, checks.VOCABULARY, seed=7)
    scores = Scores(p[:, None].expand(-1, checks.VOCABULARY, -1).log(), False)
    tokens = torch.arange(checks.VOCABULARY).expand(64, -1)
    draft = tree_of(tokens, [0] * checks.VOCABULARY, DraftKind.POINT)  # the root and all other tokens
    rule = checks.rule_of("lantern_released", delta=0.9, neighbours=2)  # its residuals differ from p
    _, tv = rule.measure(draft, scores, RandomStream.from_seed(0, 64), torch.ones(64, dtype=torch.long))
    assert (tv <= 1.0).all(), f"{tv.max()}"


def test_rules_that_were_not_fitted_say_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        test_relaxation, "UNFITTED", ["lantern_released", "grouped_released", "grouped_codebook"]
    )
    test_relaxation.test_a_rule_that_was_not_fitted_says_so()


def test_they_take_the_place_of_a_presets_rule() -> None:
    released = build_accelerator("lantern", acceptance="lantern_released")
    assert released.rule == ReleasedLantern() and released.exactness == "lossy"
    assert build_accelerator("gsd", acceptance="grouped_released").rule == ReleasedGrouped()
    assert not released.rule.keeps_greedy


def test_rows_of_their_own_settings(classes) -> None:  # type: ignore[no-untyped-def]  # noqa: F811
    options = {"window": 8, "acceptance": "lantern_released", "delta": 0.3}
    test_row_settings.test_images("sjd", options, classes)
