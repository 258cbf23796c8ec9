"""Rejection sampling rules: exact for any q from which the candidates were really drawn.

A candidate with q(x) = 0 was not drawn from q, because no mass was left. It is skipped.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.random_stream import RandomStream
from mmspec.core.verdict import Path
from mmspec.kernels import reject_tree
from mmspec.kernels.chain import normalise
from mmspec.trees.verification import ChainRejection, end_at, place_uniforms, sampled_distribution, walk

__all__ = ["KSequential", "RecursiveRejection", "SpeculativeSampling"]


class SpeculativeSampling(ChainRejection):
    """Speculative sampling: accept x ~ q with min(1, p(x) / q(x)), otherwise draw from norm((p - q)+).

    Leviathan et al., 2211.17192, algorithm 1; Chen et al., 2302.01318. One candidate per place.
    """


class RecursiveRejection(AcceptanceRule):
    """Recursive rejection sampling: try the siblings in the order of their draws, each against the residual.

    SpecInfer, 2305.09781; MCSD, 2401.06706. After a rejection p <- norm((p - q)+). Siblings drawn without
    replacement also change q: q(x) <- 0, renormalised. If all are rejected, the token is drawn from the last
    residual.
    """

    sound_for = frozenset({DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT})

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        p, q = scores.p, sampled_distribution(draft).p
        u = place_uniforms(draft, random, emitted, draft.max_children, p.dtype)
        without_replacement = draft.kind is DraftKind.WITHOUT_REPLACEMENT
        node, final = reject_tree(p, q, draft.tokens, draft.children, u, without_replacement)
        return end_at(draft, node, final, random, emitted)


class KSequential(AcceptanceRule):
    """k-SEQ: accept each of k i.i.d. candidates with min(1, p / (rho q)), with one residual at the end.

    SpecTr, 2310.15141, algorithm 2. rho is the smallest root of 1 - (1 - b)^k = rho b with
    b(rho) = sum min(q, p / rho); the residual is p - min(q, p / rho) P_accept / b, normalised.
    """

    sound_for = frozenset({DraftKind.IID})
    bisections = 40

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        draft_q = sampled_distribution(draft).p

        def judge(p: Tensor, children: Tensor, u: Tensor) -> tuple[Tensor, Tensor]:
            q = take(draft_q, (children[:, 0] - 1).clamp_min(0))
            x = draft.tokens.gather(1, children.clamp_min(0))
            drawn = (children >= 0) & (q.gather(-1, x) > 0)
            count = drawn.sum(-1, keepdim=True).to(p.dtype)  # [B, 1] k of this node
            rho = self.solve(p, q, count)
            mass = torch.minimum(q, p / rho)
            b = mass.sum(-1, keepdim=True)
            accept = drawn & (u * rho * q.gather(-1, x) <= p.gather(-1, x)) & (p.gather(-1, x) > 0)
            first = accept.long().argmax(-1, keepdim=True)
            equal = drawn & (x == x.gather(1, first))  # the first of equal siblings has their children
            first = equal.long().argmax(-1, keepdim=True)
            chosen = torch.where(accept.any(-1), children.gather(1, first)[:, 0], -1)
            p_accept = 1 - (1 - b).clamp_min(0.0) ** count
            tiny = torch.finfo(p.dtype).tiny
            left = (p - mass * (p_accept / b.clamp_min(tiny))).clamp_min(0.0)
            return chosen, torch.where(count > 0, normalise(left, otherwise=p), p)

        return walk(draft, scores.p, random, emitted, judge)

    def solve(self, p: Tensor, q: Tensor, count: Tensor) -> Tensor:
        """Solve for rho in [1, k], [B, 1], by bisection: 1 - (1 - b)^k - rho b decreases in rho."""
        low, high = torch.ones_like(count), count.clamp_min(1.0)
        for _ in range(self.bisections):
            rho = (low + high) / 2
            b = torch.minimum(q, p / rho).sum(-1, keepdim=True)
            excess = 1 - (1 - b).clamp_min(0.0) ** count - rho * b
            low, high = torch.where(excess > 0, rho, low), torch.where(excess > 0, high, rho)
        return high
