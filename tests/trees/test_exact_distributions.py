"""Every rejection rule gives the target's distribution, and has its theoretical acceptance rate."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmspec.core.draft import DraftKind
from mmspec.core.interfaces import AcceptanceRule
from mmspec.trees.rejection import KSequential, RecursiveRejection, SpeculativeSampling
from tests.contracts.toy import dirichlet
from tests.trees.exact_distribution import check, edge_distributions, exact_distribution, rows

IID, WITHOUT = DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT
CASES = [
    (SpeculativeSampling(), 1, IID),
    (SpeculativeSampling(), 1, WITHOUT),
    (RecursiveRejection(), 1, IID),
    (RecursiveRejection(), 3, IID),
    (RecursiveRejection(), 1, WITHOUT),
    (RecursiveRejection(), 3, WITHOUT),
    (KSequential(), 1, IID),
    (KSequential(), 3, IID),
]
NAMES = [f"{type(rule).__name__}-{k}-{kind.value}" for rule, k, kind in CASES]


def random_distributions(count: int = 20, vocabulary: int = 5) -> tuple[Tensor, Tensor]:
    p, q = dirichlet(2, count, vocabulary, seed=5)
    return p, q


@pytest.mark.parametrize(("rule", "siblings", "kind"), CASES, ids=NAMES)
@pytest.mark.every(2)
def test_the_output_distribution_is_the_targets(rule: AcceptanceRule, siblings: int, kind: DraftKind) -> None:
    """At every edge too; without replacement, what is drawn from nothing that is left is no candidate."""
    for p, q in (random_distributions(), edge_distributions()):
        check(exact_distribution(rule, p, q, siblings, kind), p)
    outcome = exact_distribution(rule, rows([1.0]), rows([1.0]), siblings, kind)
    check(outcome, rows([1.0]))
    assert outcome.acceptance == 1.0, "a vocabulary of one leaves no choice"


def test_one_draw_is_accepted_with_the_overlap_of_the_distributions() -> None:
    p, q = random_distributions()
    overlap = torch.minimum(p, q).sum(-1)
    for rule in (SpeculativeSampling(), RecursiveRejection(), KSequential()):
        assert torch.allclose(exact_distribution(rule, p, q, 1, IID).acceptance, overlap, rtol=0, atol=1e-11)


def test_k_sequential_accepts_with_one_minus_the_kth_power_and_grows_with_k() -> None:
    p, q = random_distributions()
    rates = []
    for k in (1, 2, 3):
        count = torch.full((len(p), 1), float(k), dtype=torch.float64)
        rho = KSequential().solve(p, q, count)
        b = torch.minimum(q, p / rho).sum(-1)
        assert ((rho >= 1) & (rho <= k)).all()
        assert torch.allclose(1 - (1 - b) ** k, rho[:, 0] * b, rtol=0, atol=1e-9), "rho solves its equation"
        rates.append(exact_distribution(KSequential(), p, q, k, IID).acceptance)
        assert torch.allclose(rates[-1], 1 - (1 - b) ** k, rtol=0, atol=1e-11)
    assert (rates[0] <= rates[1] + 1e-12).all() and (rates[1] <= rates[2] + 1e-12).all()
