"""Drafter of Hydra (2402.05109): sequential heads, each of which reads the tokens chosen by those before it.

Hydra++ first reads the target's states of the committed tokens with a layer of its own, whose keys and values
are the only cache.
"""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.indexing import pick
from mmspec.core.session import PromptBatch
from mmspec.heads.drafter import HeadSession, LevelDrafter, StateSession
from mmspec.heads.feature_session import FeatureDrafter, FeatureSession
from mmspec.methods.hydra.head import HydraHead
from mmspec.trees.growth import TreeGrowth

__all__ = ["HydraDrafter"]


class HydraGrowth(HeadSession):
    """A session whose tree grows by one head a level."""

    head: HydraHead

    def grow(self, canvas: Canvas, hidden: Tensor) -> Draft:
        """Grow a tree from the state [R, d] that the heads read at the root."""
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
    """Heads that read the target's hidden state directly."""

    def propose(self, canvas: Canvas) -> Draft:
        return self.grow(canvas, self.hidden)


class PrefixSession(HydraGrowth, FeatureSession):
    """Heads that read the output of a layer of their own over the hidden states (Hydra++)."""

    head: HydraHead

    def propose(self, canvas: Canvas) -> Draft:
        return self.grow(canvas, self._read_committed(canvas))


def open_session(drafter: HydraDrafter, batch: PromptBatch) -> HydraGrowth:
    """Open the session of heads with or without a layer of their own."""
    kind = PrefixSession if drafter.model.config.prefix_attention else HydraSession
    return kind(drafter, batch)


class HydraDrafter(LevelDrafter, FeatureDrafter):
    """Drafts a tree with heads that each read the path so far.

    Args: see `LevelDrafter`.
    """

    session = staticmethod(open_session)
