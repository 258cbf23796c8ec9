"""Hydra: heads one after another, each told which tokens the heads before it chose.

Hydra (2402.05109) with exact acceptance. The tree grows level by level, a head for each; Hydra++ reads what
the target made of the committed tokens by a layer of its own first, whose cache is all that is kept.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft
from mmspec.decoding.indexing import pick
from mmspec.drafters.feature_session import FeatureDrafter, FeatureSession
from mmspec.drafters.growth import TreeGrowth
from mmspec.drafters.heads import HeadBatch, HeadSession, LevelDrafter, StateSession
from mmspec.models.hydra import HydraHead

__all__ = ["HydraDrafter"]


class HydraGrowth(HeadSession):
    """A session whose tree grows by one head a level."""

    head: HydraHead

    def grow(self, root: Tensor, hidden: Tensor) -> Draft:
        """Grow the tree of root [B] by the state [R, d] that the heads read there."""
        growth = TreeGrowth(self.shape, root)
        path = self._embed(growth)  # [R, w, i + 1, d] tokens of the path to each node that is expanded
        while True:
            self.passes += 1
            state = hidden[:, None].expand(-1, path.shape[1], -1)
            logits = self.head.predict(state, path, self.target.head)
            parent = growth.grow(self._log_probabilities(self._guided(logits)))
            if growth.is_grown:
                return growth.draft()
            before = pick(path, self._copied(parent))
            path = torch.cat([before, self._embed(growth)], 2)

    def _embed(self, growth: TreeGrowth) -> Tensor:
        """[R, w, 1, d] embeddings of the nodes expanded last."""
        return self.target.embed(self._copied(growth.tokens))[:, :, None]


class HydraSession(HydraGrowth, StateSession):
    """Heads that read the target's hidden state as it is."""

    def propose(self, canvas: Canvas) -> Draft:
        return self.grow(canvas.root, self.hidden)


class PrefixSession(HydraGrowth, FeatureSession):
    """Heads that read what a layer of their own makes of the hidden states (Hydra++)."""

    head: HydraHead

    def propose(self, canvas: Canvas) -> Draft:
        return self.grow(canvas.root, self._read_committed(canvas))


def open_session(drafter: HydraDrafter, batch: HeadBatch) -> HydraGrowth:
    """Open the session for heads with a layer of their own, or without."""
    kind = PrefixSession if drafter.model.config.prefix_attention else HydraSession
    return kind(drafter, batch)


class HydraDrafter(LevelDrafter, FeatureDrafter):
    """A tree by heads that each know the path so far.

    Args: as of `LevelDrafter`.
    """

    title = "Hydra's heads"
    session = staticmethod(open_session)
