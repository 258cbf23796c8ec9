"""Drafter of Medusa (2401.10774): one head for each level of the tree, all on one hidden state.

A head does not see the tokens of the others, so that the tree is a product of their distributions. One small
forward pass computes all levels, and nothing is cached. Acceptance is exact, unlike Medusa's typical
acceptance.
"""

from __future__ import annotations

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.heads.drafter import LevelDrafter, StateSession
from mmspec.methods.medusa.head import MedusaHead

__all__ = ["MedusaDrafter"]


class MedusaSession(StateSession):
    """Heads that predict all levels of the tree in one forward pass."""

    head: MedusaHead

    def propose(self, canvas: Canvas) -> Draft:
        self.passes += 1
        predicted = self.head(self.hidden, self.shape.depth)  # [R, D, d]
        logits = self.head.logits(predicted, self.read_out)
        log_p = self._log_probabilities(self._guided(logits))  # [B, D, V]
        growth = self.growth(canvas)
        while not growth.is_grown:
            growth.grow(log_p[:, growth.level, None].expand(-1, growth.tokens.shape[1], -1))
        return self.rated(growth)


class MedusaDrafter(LevelDrafter):
    """Drafts a tree with heads that each predict one token.

    Args: see `LevelDrafter`.
    """

    session = MedusaSession
