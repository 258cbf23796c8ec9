"""Trees of candidates that a head grows by one pass a level, from hidden states of its own."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.image_grid import Grammar, exclude
from mmspec.core.indexing import pick
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.heads.feature_session import FeatureDrafter, FeatureSession

__all__ = ["GrownTreeDrafter", "GrownTreeSession"]


class GrownTreeSession(FeatureSession):
    """A head that grows a tree by one pass a level."""

    row_fields = named("grammar")

    def __init__(self, drafter: FeatureDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        layouts = [request.layout for request in batch.requests if request.layout is not None]
        forced = [layout.forced for layout in layouts]
        self.grammar = Grammar(forced, self.target.device) if layouts else None
        self.codes = layouts[0].codebook_size if layouts else 0

    def propose(self, canvas: Canvas) -> Draft:
        growth = self.growth(canvas)
        hidden = self._read_committed(canvas)[:, None]  # [R, w, d] at the nodes expanded last
        while True:
            parent = growth.grow(self._log_probabilities(self._logits(hidden, canvas.emitted + growth.level)))
            if growth.is_grown:
                return self.rated(growth)
            before = pick(hidden, self._copied(parent))
            hidden = self._read(before, growth.nodes(growth.tokens))

    def _logits(self, hidden: Tensor, index: Tensor) -> Tensor:
        """[B, w, V'] logits, by states [R, w, d], of the tokens at output index [B]."""
        logits = self._guided(self.head.logits(hidden, self.read_out))
        if self.grammar is None:
            return logits
        return exclude(logits, self.grammar.at(index[:, None]), self.codes, self.names)


class GrownTreeDrafter(FeatureDrafter):
    """A tree of continuations by a head that predicts hidden states.

    Args: as of `HeadDrafter`.
    """

    session: Callable[..., GrownTreeSession] = GrownTreeSession
