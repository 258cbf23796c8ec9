"""Exact output distribution of a rule that verifies a chain as a whole, computed with the rule's code.

Every chain over a small vocabulary is a row. The probability to stop at a place is found by bisection on its
uniform, with all others out of reach, so that the integral over the uniforms is exact.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import DraftKind
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.random_stream import Purpose
from tests.contracts.toy import dirichlet
from tests.oracles import tree_of
from tests.trees.exact_distribution import BISECTIONS, Dial, caught_draws

NEVER = 2.0  # no uniform is above 1


class ChainDial(Dial):
    """A stream whose uniforms are set by hand, one a place: [rows, places]."""

    def uniform(self, position: Tensor, purpose: Purpose, count: int, dtype: torch.dtype) -> Tensor:
        return self.keys[:, :, None]


@dataclass(frozen=True)
class Chains:
    """All chains of K tokens, [R, K], and what target and draft say of them.

    Attributes:
        p: [R, K + 1, V] after each node.
        q: [R, K, V].
        ends: [R, K] whether the drafter stops before each candidate, as decided by those before it.
    """

    tokens: Tensor
    p: Tensor
    q: Tensor
    ends: Tensor

    @classmethod
    def random(cls, seed: int, places: int = 3, vocabulary: int = 3, edges: bool = False) -> Chains:
        """Draw distributions for every prefix; with edges, a drafter that stops early, and zeros in both."""
        tokens = torch.tensor(list(itertools.product(range(vocabulary), repeat=places)))
        p, q, ends = [], [], []
        for place in range(places + 1):
            prefix = (tokens[:, :place] * vocabulary ** torch.arange(place)).sum(-1)
            own, drafted = dirichlet(2, vocabulary**place, vocabulary, seed=100 * seed + place)
            if edges:
                own[::3], drafted[1::4] = drafted[::3], own[1::4]  # equal
                own[::4, 0], drafted[::5, 1], own[1::4, 1:] = 0.0, 0.0, 0.0
                own, drafted = (each / each.sum(-1, keepdim=True) for each in (own, drafted))
            p.append(own[prefix])
            q.append(drafted[prefix])
            ends.append(edges & (prefix % 5 == 4) & (place > 0))
        return cls(tokens, torch.stack(p, 1), torch.stack(q[:-1], 1), torch.stack(ends[:-1], 1))

    @property
    def drawn(self) -> Tensor:
        """[R, K] the candidates that there are."""
        return ~self.ends.cumsum(-1).bool()

    @property
    def weight(self) -> Tensor:
        """[R] probability that a chain is drawn; those that are equal up to their end share that of it."""
        return self.q.gather(-1, self.tokens[..., None])[..., 0].prod(-1)

    @property
    def ratios(self) -> Tensor:
        """[R, K] p / q of each candidate."""
        p, q = (each.gather(-1, self.tokens[..., None])[..., 0] for each in (self.p[:, :-1], self.q))
        return p / q.clamp_min(1e-300)

    def joint(self) -> Tensor:
        """[V] * (K + 1): the target's joint distribution of the next tokens."""
        return self.spread(self.p[:, 0], torch.full_like(self.weight, 1 / len(self.p)), 0)

    def spread(self, final: Tensor, mass: Tensor, kept: int) -> Tensor:
        """Distribute masses [R] of kept prefixes: a token drawn from `final` [R, V], others from p."""
        places, size = self.tokens.shape[1], self.p.shape[-1]
        shape = [size] * (places + 1)
        out = (mass[:, None] * final).view(size**kept, -1, size).sum(1).view(shape[: kept + 1])
        for place in range(kept + 1, places + 1):
            after = self.p[:, place].view(shape)[(..., *[0] * (places - place), slice(None))]
            out = out[..., None] * after
        return out


def judge(rule: AcceptanceRule, chains: Chains) -> tuple[Tensor, list[Tensor]]:
    """[R, K + 1] acceptance probability of each prefix, [R, V] what follows it, for each length from 0 on."""
    rows, places = chains.tokens.shape
    nodes = torch.cat([torch.zeros(rows, 1, dtype=torch.long), chains.tokens], 1)
    draft = tree_of(nodes, [max(0, i - 1) for i in range(places + 1)], DraftKind.IID, Categorical(chains.q))
    draft = replace(draft, valid=torch.cat([draft.valid[:, :1], chains.drawn], 1))
    scores = Scores(chains.p.log(), greedy=False)

    def kept(u: Tensor) -> tuple[Tensor, Tensor]:
        with caught_draws() as caught:
            path = rule.verify(draft, scores, ChainDial(u), torch.ones(rows, dtype=torch.long))
        return path.accepted, caught[0]

    never = torch.full((rows, places), NEVER, dtype=chains.p.dtype)
    accepted, final = kept(never)
    assert not accepted.any()
    passes, finals = [torch.ones(rows, dtype=chains.p.dtype)], [final]
    for place in range(1, places + 1):
        low, high = torch.zeros(rows, dtype=chains.p.dtype), torch.ones(rows, dtype=chains.p.dtype)
        u = never.clone()
        u[:, place - 1] = 1.0
        always = kept(u)[0] == place
        for _ in range(BISECTIONS):
            u[:, place - 1] = (low + high) / 2
            hit = kept(u)[0] == place
            low, high = torch.where(hit, u[:, place - 1], low), torch.where(hit, high, u[:, place - 1])
        passes.append(torch.where(always, 1.0, torch.where(low > 0, (low + high) / 2, 0.0)))
        u[:, place - 1] = 0.0
        finals.append(kept(u)[1])
    return torch.stack(passes, 1), finals


def integrate(chains: Chains, passes: Tensor, finals: list[Tensor]) -> tuple[Tensor, float]:
    """[V] * (K + 1) joint distribution of the next tokens, and the mean of tokens accepted; of `judge`."""
    out, mean, longer = torch.zeros_like(chains.joint()), 0.0, torch.ones_like(chains.weight)
    for kept in reversed(range(passes.shape[1])):
        mass = chains.weight * longer * passes[:, kept]
        longer = longer * (1 - passes[:, kept])
        mean += kept * float(mass.sum())
        out += chains.spread(finals[kept], mass, kept)
    return out, mean
