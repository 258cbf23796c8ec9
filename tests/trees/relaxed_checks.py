"""Relaxed rules, fitted, and random distributions to judge them by."""

from __future__ import annotations

from torch import Tensor

from mmspec.core.draft import DraftKind
from mmspec.core.interfaces import AcceptanceRule
from mmspec.plugins import RULES
from tests.contracts.toy import dirichlet
from tests.trees.codes import fitted

POINT, IID, WITHOUT = DraftKind.POINT, DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT
VOCABULARY = 6
ROUNDING = 1e-9
MORE: list[tuple[str, AcceptanceRule]] = []  # relaxed rules of a package outside


def rule_of(name: str, vocabulary: int = VOCABULARY, syntax: int = 0, **options: object) -> AcceptanceRule:
    return fitted(RULES[name](**options), vocabulary, syntax)  # type: ignore[call-arg]


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


def relaxed_rules() -> list[tuple[str, AcceptanceRule]]:
    """Every relaxed rule as it is meant to be used, fitted."""
    rules = [(f"budget {rule}", rule) for rule in budgets(0.3)]
    rules += [(name, rule_of(name)) for name in ("lantern", "lantern++", "grouped")]
    return [*rules, ("lantern of one", rule_of("lantern", delta=1, neighbours=1)), *MORE]
