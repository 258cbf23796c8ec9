"""Medusa and Hydra: one head for each level of the tree.

Medusa's heads (2401.10774) all read one hidden state and do not know what the others chose, so that the tree
is a product of what each says; all of it is known after one small pass, and nothing is cached. Hydra's
(2402.05109) go one after another, each told which tokens the heads before it chose; Hydra++ reads what the
target made of the committed tokens by a layer of its own first, whose cache is all that is kept. Acceptance
is exact, in place of Medusa's typical one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft
from mmspec.decoding.indexing import pick
from mmspec.drafters.feature_session import FeatureDrafter, FeatureSession
from mmspec.drafters.heads import HeadDrafter, HeadSession, StateSession
from mmspec.drafters.session import PromptBatch
from mmspec.drafters.tree import TreeGrowth
from mmspec.models.hydra import HydraHead
from mmspec.models.medusa import MedusaHead

__all__ = ["HydraDrafter", "MedusaDrafter"]


class LevelDrafter(HeadDrafter):
    """A tree by one head for each of its levels, so that it is at most as deep as there are heads.

    Args: as of `HeadDrafter`; `tree` may be "measured" too, the best static one of its size by what the
        training measured.
    """

    @property
    def deepest(self) -> tuple[int, str]:
        return self.model.config.num_heads, "the number of heads"


class MedusaSession(StateSession):
    """Heads that predict all levels of the tree at once."""

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
    """A tree by heads that each predict one token.

    Args: as of `LevelDrafter`.
    """

    title = "Medusa's heads"
    session = MedusaSession


class HydraGrowth(HeadSession):
    """A session whose tree grows by one head a level."""

    head: HydraHead

    def grow(self, canvas: Canvas, hidden: Tensor) -> Draft:
        """Grow a tree by the state [R, d] that the heads read at the root."""
        growth = self.growth(canvas)
        path = self._embed(growth)  # [R, w, i + 1, d] tokens of the path to each node that is expanded
        while True:
            self.passes += 1
            state = hidden[:, None].expand(-1, path.shape[1], -1)
            logits = self.head.predict(state, path, self.read_out)
            parent = growth.grow(self._log_probabilities(self._guided(logits)))
            if growth.is_grown:
                return self.rated(growth)
            before = pick(path, self._copied(parent))
            path = torch.cat([before, self._embed(growth)], 2)

    def _embed(self, growth: TreeGrowth) -> Tensor:
        """[R, w, 1, d] embeddings of the nodes expanded last."""
        return self.target.embed(self._copied(growth.tokens))[:, :, None]


class HydraSession(HydraGrowth, StateSession):
    """Heads that read the target's hidden state as it is."""

    def propose(self, canvas: Canvas) -> Draft:
        return self.grow(canvas, self.hidden)


class PrefixSession(HydraGrowth, FeatureSession):
    """Heads that read what a layer of their own makes of the hidden states (Hydra++)."""

    head: HydraHead

    def propose(self, canvas: Canvas) -> Draft:
        return self.grow(canvas, self._read_committed(canvas))


def open_session(drafter: HydraDrafter, batch: PromptBatch) -> HydraGrowth:
    """Open the session for heads with a layer of their own, or without."""
    kind = PrefixSession if drafter.model.config.prefix_attention else HydraSession
    return kind(drafter, batch)


class HydraDrafter(LevelDrafter, FeatureDrafter):
    """A tree by heads that each know the path so far.

    Args: as of `LevelDrafter`.
    """

    title = "Hydra's heads"
    session = staticmethod(open_session)
