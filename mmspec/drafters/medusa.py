"""Medusa: several heads on one hidden state each predict a token of their own.

Medusa (2401.10774) with exact acceptance in place of its typical one. Heads do not know what the others
chose, so that the tree is a product of what each says; all of it is known after one small pass, and nothing
is cached.
"""

from __future__ import annotations

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft
from mmspec.drafters.growth import TreeGrowth
from mmspec.drafters.heads import LevelDrafter, StateSession
from mmspec.models.medusa import MedusaHead

__all__ = ["MedusaDrafter"]


class MedusaSession(StateSession):
    """Heads that predict all levels of the tree at once."""

    head: MedusaHead

    def propose(self, canvas: Canvas) -> Draft:
        self.passes += 1
        predicted = self.head(self.hidden, self.shape.depth)  # [R, D, d]
        logits = self.head.logits(predicted, self.target.head)
        log_p = self._log_probabilities(self._guided(logits))  # [B, D, V]
        growth = TreeGrowth(self.shape, canvas.root)
        while not growth.is_grown:
            growth.grow(log_p[:, growth.level, None].expand(-1, growth.tokens.shape[1], -1))
        return growth.draft()


class MedusaDrafter(LevelDrafter):
    """A tree by heads that each predict one token.

    Args: as of `LevelDrafter`.
    """

    title = "Medusa's heads"
    session = MedusaSession
