"""The delta-budget: exact with 0, LANTERN with the largest, and monotonic in between."""

from __future__ import annotations

import pytest
import torch

from mmspec.core.draft import DraftKind
from mmspec.core.sampling import Sampler
from mmspec.methods.lantern.rule import Lantern
from mmspec.trees.budget import Budget
from mmspec.trees.rejection import RecursiveRejection, SpeculativeSampling
from mmspec.trees.relaxed_sampling import RelaxedSampling
from tests.contracts.running import decode
from tests.contracts.toy import dirichlet, toy_distribution, toy_target
from tests.oracles import SampledTreeDrafter
from tests.trees import relaxed_checks as checks
from tests.trees.codes import fitted

IID, WITHOUT = DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT


def budget_rules(delta: float) -> dict[str, Budget]:
    return {
        "neighbours": fitted(Budget(delta, neighbours=2), 6),
        "groups": Budget(delta, "groups", group_size=2),
        "omega": Budget(delta, "omega"),
    }  # type: ignore[dict-item]


@pytest.mark.parametrize(
    ("relaxation", "sampler"),
    [("neighbours", Sampler(0.7, top_k=4)), ("groups", Sampler(1.0)), ("omega", Sampler(0.7, top_k=4))],
)
def test_without_a_budget_it_is_the_exact_rule_token_for_token(relaxation: str, sampler: Sampler) -> None:
    rule = budget_rules(0.0)[relaxation]
    for exact, widths, kind in (
        (SpeculativeSampling(), (1, 1, 1), IID),
        (RecursiveRejection(), (3, 2), IID),
        (RecursiveRejection(), (2, 2), WITHOUT),
    ):
        drafter = SampledTreeDrafter(toy_distribution(), widths, kind)
        runs = [
            decode(toy_target(), [(1, 2)] * 300, drafter, each, sampler, max_new_tokens=12, seed=8)
            for each in (exact, rule)
        ]
        assert runs[0].outputs == runs[1].outputs
        assert runs[1].stats.tv_max < 1e-6


def test_with_the_whole_budget_it_accepts_all_that_lantern_does() -> None:
    p, q = checks.random_distributions(50)
    whole, lantern = (fitted(rule, 6) for rule in (Budget(1.0, neighbours=3), Lantern(1.0, neighbours=3)))
    assert isinstance(whole, RelaxedSampling) and isinstance(lantern, RelaxedSampling)
    allowance = torch.ones_like(p[:, :1])
    mass = whole.mass(p, q, allowance)
    torch.testing.assert_close(mass, lantern.mass(p, q, allowance), rtol=0, atol=1e-12)
    assert (mass.sum(-1) > torch.minimum(p, q).sum(-1)).any()


def test_the_omega_of_a_place_spends_its_budget() -> None:
    """The least omega that spends it, so that what is relaxed is spread as COOL-SD spreads it."""
    p, q = dirichlet(2, 50, 8, seed=2)
    allowance = torch.full_like(p[:, :1], 0.05)
    omega = 1 / Budget(0.05, "omega").inverse_omega(p, q, allowance)
    spent = (torch.minimum(q, omega * p) - p).clamp_min(0).sum(-1)
    enough = (q - p).clamp_min(0).sum(-1) > 0.05
    assert enough.any() and ((spent - 0.05).abs()[enough] < 1e-3).all() and (spent[enough] >= 0.05).all()
