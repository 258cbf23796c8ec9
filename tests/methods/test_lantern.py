"""LANTERN equals a loop; expensive variations are measured once per round."""

from __future__ import annotations

import pytest
import torch

from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.methods.lantern.rule import Lantern
from tests.contracts.toy import dirichlet
from tests.methods import slow_rules
from tests.trees import relaxed_checks as checks
from tests.trees.codes import fitted
from tests.trees.exact_distribution import exact_distribution, point_distribution

IID, WITHOUT = DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT


LIMITS = {"delta": {"delta": 0.1}, "delta 1": {"delta": 1.0}, "lam": {"lam": 3.0}}


@pytest.mark.parametrize(("limit", "syntax"), [("delta", 0), ("delta 1", 2), ("lam", 2)])
def test_lantern_of_one_deterministic_candidate_equals_the_loop(limit: str, syntax: int) -> None:
    rule = checks.rule_of("lantern", syntax=syntax, neighbours=3, **LIMITS[limit])
    assert isinstance(rule, Lantern)
    table = rule.nearest.tolist()
    p = checks.random_distributions(48)[0]
    tokens = torch.arange(6).repeat(8)
    output = point_distribution(rule, p, tokens[:, None]).output
    added = 0
    for row, (p_row, x) in enumerate(zip(p.tolist(), tokens.tolist(), strict=True)):
        top = rule.delta if rule.lam is None else (rule.lam - 1) * p_row[x]
        near = table[x] if x < len(table) else []
        expected = slow_rules.lantern_of_one_point(p_row, x, near, top)
        torch.testing.assert_close(output[row].tolist(), expected, rtol=0, atol=1e-10)
        added += slow_rules.prefix(p_row, near, top)[0] > 0
    assert added > 5


def test_an_expensive_rule_measures_one_judged_place_a_round() -> None:
    """LANTERN with a chain of sampled tokens: the measured place was verified, and the others are NaN."""
    rule = fitted(Lantern(0.3, neighbours=2), 6)
    rows = 300
    p = dirichlet(rows, 5, 6, seed=1)
    q = dirichlet(rows, 5, 6, seed=2) * 0.3 + 0.7 * p.roll(1, 1)
    random = RandomStream.from_seed(2, rows)
    tokens = (q.log() + random.gumbel(torch.arange(5).expand(rows, 5), Purpose.DRAFT, 6, q.dtype)).argmax(-1)
    emitted = torch.arange(rows)
    draft = Tree.chain(tokens, IID, Categorical(q[:, 1:]))
    path, tv = rule.measure(draft, Scores(p.log(), False), random, emitted)
    measured = ~tv.isnan()
    assert measured.sum(-1).tolist() == [1] * rows
    place = measured.long().argmax(-1)
    assert (place <= path.accepted).all() and len(set(place.tolist())) == 4
    for row in range(0, rows, 20):
        at = int(place[row])
        outcome = exact_distribution(rule, p[row, at][None], q[row, at + 1][None], 1, IID)
        assert outcome.tv is not None and abs(float(outcome.tv - tv[row, at])) < 1e-9
