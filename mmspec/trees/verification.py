"""Shared parts of acceptance rules: rejection sampling along a chain, and the descent of a tree."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmspec.core.distributions import AnyDistribution, Distribution, PointMass, draw
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import AcceptanceRule
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.verdict import Path
from mmspec.kernels.tree_rejection import Judge, descend

__all__ = ["ChainRejection", "end_at", "place_uniforms", "sampled_distribution", "walk"]


def sampled_distribution(draft: Tree) -> AnyDistribution:
    """Return the draft's q: [T, n - 1] distributions of the same kind as the target's.

    Raises:
        TypeError: the draft was not drawn from one; accelerators check this when they are built.
    """
    if isinstance(draft.q, PointMass):
        raise TypeError(
            f"a {draft.kind.value} draft has no q; rejection rules need the distribution it was drawn from"
        )
    return draft.q


def walk(draft: Tree, p: Tensor, random: RandomStream, emitted: Tensor, judge: Judge) -> Path:
    """Verify a draft from the root down; `judge` chooses among the children of each visited node.

    Args:
        p: [B, n, V] the target's distribution after each node.
    """
    u = place_uniforms(draft, random, emitted, draft.max_children, p.dtype)
    return end_at(draft, *descend(p, draft.children, u, judge), random, emitted)


def place_uniforms(
    draft: Tree, random: RandomStream, emitted: Tensor, count: int, dtype: torch.dtype
) -> Tensor:
    """[B, D, count] uniforms for each depth, keyed by output index."""
    steps = torch.arange(draft.max_depth, device=emitted.device)
    return random.uniform(emitted[:, None] + steps, Purpose.ACCEPT, count, dtype)


def end_at(draft: Tree, node: Tensor, final: Tensor, random: RandomStream, emitted: Tensor) -> Path:
    """Build the path that ends in `node` [B], with the next token drawn from `final` [B, V]."""
    accepted = node if draft.is_chain else take(draft.depth, node)
    return Path.at(draft, node, draw(final, random, emitted + accepted, draft.last_purpose))


class ChainRejection(AcceptanceRule):
    """Base of rules that verify one candidate per place by speculative sampling, with some p and q.

    All places are verified at once, because each decision depends on its own place only. Without candidates,
    this is plain decoding.
    """

    sound_for = frozenset({DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT})
    chains_only = True
    distribution = Distribution

    def verify(self, draft: Tree, scores: Distribution, random: RandomStream, emitted: Tensor) -> Path:
        if not draft.max_depth:
            return Path.root(draft, scores.choose(draft, random, emitted)[:, 0])
        scores, q = self.compared(draft, scores, random, emitted)
        u = place_uniforms(draft, random, emitted, 1, scores.dtype)[..., 0]
        node, next_token, filled = scores.verify_chain(q, draft, u, random, emitted)
        path = Path.at(draft, node, next_token)
        return replace(path, decided=path.accepted + filled)

    def compared(
        self, draft: Tree, scores: AnyDistribution, random: RandomStream, emitted: Tensor
    ) -> tuple[Distribution, Distribution]:
        """Distributions p and q at every node for the acceptance test; arguments as in `verify`."""
        return scores, sampled_distribution(draft)
