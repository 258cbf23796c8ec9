"""Exact output distribution of a rejection rule at one place, computed with the rule's code.

Every tuple of siblings is a row. A rule compares one uniform per sibling with a threshold; the threshold is
found by bisection on that uniform, so the integral over the uniforms is exact, and what is drawn from in the
end is caught before the draw. Nothing here repeats the formulas of the rules.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from mmspec.core import distributions
from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import DraftKind
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.kernels import chain
from mmspec.trees import rejection, verification
from tests.oracles import tree_of

BISECTIONS = 48
EXACT = 1e-12


class Dial(RandomStream):
    """A stream whose uniforms are set by hand; u: [rows, siblings]."""

    def uniform(self, position: Tensor, purpose: Purpose, count: int, dtype: torch.dtype) -> Tensor:
        return self.keys[:, None, :count]

    def gumbel(self, position: Tensor, purpose: Purpose, count: int, dtype: torch.dtype) -> Tensor:
        return torch.zeros(*position.shape, count, dtype=dtype)


@contextmanager
def caught_draws() -> Iterator[list[Tensor]]:
    """Catch the distributions that a rule, or the op that it calls, draws from."""
    caught: list[Tensor] = []
    real = distributions.draw

    def draw(p: Tensor, random: RandomStream, index: Tensor, purpose: Purpose) -> Tensor:
        caught.append(p)
        return real(p, random, index, purpose)

    with pytest.MonkeyPatch.context() as patch:
        for module in (distributions, verification):
            patch.setattr(module, "draw", draw)
        patch.setattr(chain, "_draw", lambda p, *noise: caught.append(p) or p.argmax(-1))
        yield caught


@dataclass(frozen=True)
class Outcome:
    """Output distribution [C, V], probability [C] that some candidate is accepted, reported variation [C]."""

    output: Tensor
    acceptance: Tensor
    tv: Tensor | None = None


def sibling_tuples(q: Tensor, siblings: int, kind: DraftKind) -> tuple[Tensor, Tensor, Tensor]:
    """Enumerate the draws from q [C, V]: case [R], tokens [R, k], probability [R].

    Where q has no token left to draw, the remaining siblings are token 0, which q then excludes.
    """
    cases, vocabulary = q.shape
    tuples = torch.tensor(list(itertools.product(range(vocabulary), repeat=siblings)))
    case = torch.arange(cases).repeat_interleave(len(tuples))
    tokens = tuples.repeat(cases, 1)
    weight, left = torch.ones(len(tokens), dtype=q.dtype), q[case].clone()
    for sibling in range(siblings):
        x = tokens[:, sibling : sibling + 1]
        exhausted = (left.sum(-1) == 0) & (x[:, 0] == 0)
        weight = weight * torch.where(exhausted, 1.0, left.gather(1, x)[:, 0])
        if kind is DraftKind.WITHOUT_REPLACEMENT:
            left.scatter_(1, x, 0.0)
            left = left / left.sum(-1, keepdim=True).clamp_min(1e-300)
    drawn = weight > 0
    return case[drawn], tokens[drawn], weight[drawn]


def exact_distribution(rule: AcceptanceRule, p: Tensor, q: Tensor, siblings: int, kind: DraftKind) -> Outcome:
    """Integrate a rule over honest draws from q. p, q: [C, V] float64."""
    case, tokens, weight = sibling_tuples(q, siblings, kind)
    return integrate(rule, p, q, kind, case, tokens, weight)


def point_distribution(rule: AcceptanceRule, p: Tensor, tokens: Tensor) -> Outcome:
    """Integrate a rule over deterministic siblings, tokens [R, k], of every row of p [R, V]."""
    case, one_hot = torch.arange(len(p)), torch.zeros_like(p)
    return integrate(rule, p, one_hot, DraftKind.POINT, case, tokens, torch.ones_like(p[:, 0]))


def integrate(
    rule: AcceptanceRule,
    p: Tensor,
    q: Tensor,
    kind: DraftKind,
    case: Tensor,
    tokens: Tensor,
    weight: Tensor,
) -> Outcome:
    """Integrate a rule over the uniforms. Rows are sibling tuples: tokens [R, k] of case [R], weight [R]."""
    rows, siblings = tokens.shape
    nodes = torch.cat([torch.zeros(rows, 1, dtype=torch.long), tokens], 1)
    draft_q = None if kind is DraftKind.POINT else q[case][:, None].repeat(1, siblings, 1)
    draft = tree_of(nodes, [0] * (siblings + 1), kind, None if draft_q is None else Categorical(draft_q))
    scores = Scores(p[case].log()[:, None].expand(-1, siblings + 1, -1), greedy=False)
    emitted = torch.ones(rows, dtype=torch.long)
    reported: list[Tensor] = []

    def accepted(u: Tensor) -> tuple[Tensor, Tensor]:
        with caught_draws() as caught:
            verdict, tv = rule.measure(draft, scores, Dial(u), emitted)
        reported[:] = [tv[:, 0]] if tv.shape[1] else []
        (final,) = caught
        return torch.where(verdict.accepted > 0, verdict.nodes[:, 1], 0), final

    def hits(sibling: int, node: Tensor) -> Tensor:
        """Whether a sibling is accepted; a rule may go on from the first of those that are equal."""
        equal = nodes.gather(1, node[:, None])[:, 0] == tokens[:, sibling]
        return (node > 0) & (node <= sibling + 1) & equal

    survived, output = weight, torch.zeros_like(p)
    for sibling in range(siblings):
        low, high = torch.zeros(rows, dtype=p.dtype), torch.ones(rows, dtype=p.dtype)
        u = torch.ones(rows, siblings, dtype=p.dtype)  # 1 rejects whatever can be rejected
        node, final = accepted(u)
        always = hits(sibling, node)
        for _ in range(BISECTIONS):
            u[:, sibling] = (low + high) / 2
            hit = hits(sibling, accepted(u)[0])
            low, high = torch.where(hit, u[:, sibling], low), torch.where(hit, high, u[:, sibling])
        threshold = torch.where(always, 1.0, torch.where(low > 0, (low + high) / 2, 0.0))
        output.index_put_((case, tokens[:, sibling]), survived * threshold, accumulate=True)
        survived = survived * (1 - threshold)
    refused = torch.zeros(len(p), dtype=p.dtype).index_add_(0, case, survived)
    rejected = torch.where((survived > 0)[:, None], final, 0.0) * survived[:, None]
    output.index_add_(0, case, rejected)
    # the total variation that the rule reports, averaged over the draws
    tv = [torch.zeros(len(p), dtype=p.dtype).index_add_(0, case, weight * each) for each in reported]
    return Outcome(output, 1 - refused, tv[0] if tv else None)


def rows(*values: list[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def edge_distributions() -> tuple[Tensor, Tensor]:
    """p and q at the edges, one pair a row: equal, one-hot, disjoint, truncated."""
    general = [0.1, 0.2, 0.3, 0.4]
    pairs = [
        (general, general),  # q = p: the residual is 0 / 0
        ([1.0, 0, 0, 0], [1.0, 0, 0, 0]),
        (general, [0, 0, 1.0, 0]),  # q one-hot
        (general, [1.0, 0, 0, 0]),  # q one-hot at token 0
        ([0, 1.0, 0, 0], general),  # p one-hot
        ([1.0, 0, 0, 0], general),  # p one-hot at token 0
        ([0, 1.0, 0, 0], [1.0, 0, 0, 0]),  # both one-hot, apart
        ([0.5, 0.5, 0, 0], [0, 0, 0.3, 0.7]),  # disjoint supports
        ([0.6, 0.4, 0, 0], general),  # p after top-k
        (general, [0, 0.5, 0.5, 0]),  # q after top-k
        ([0, 0.7, 0.3, 0], [0, 0, 0.5, 0.5]),  # both, overlapping
        ([1e-12, 1 - 1e-12, 0, 0], [1 - 1e-12, 1e-12, 0, 0]),
    ]
    return rows(*(p for p, _ in pairs)), rows(*(q for _, q in pairs))


def check(outcome: Outcome, p: Tensor) -> None:
    error = (outcome.output - p).abs().amax(-1)
    assert not outcome.output.isnan().any()
    worst = int(error.argmax())
    assert error.max() < EXACT, f"case {worst}: {outcome.output[worst]} is not {p[worst]}"


def check_edges() -> None:
    """The edges under three siblings without replacement, where some q have fewer tokens than that."""
    p, q = edge_distributions()
    check(exact_distribution(rejection.RecursiveRejection(), p, q, 3, DraftKind.WITHOUT_REPLACEMENT), p)
