"""Drafters of EAGLE-3 (2503.01840) and of P-EAGLE, whose head predicts all levels in one forward pass."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.nn.utils.rnn import pad_sequence

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.indexing import pick
from mmspec.core.session import PromptBatch
from mmspec.heads.feature_session import GrownTreeDrafter, GrownTreeSession
from mmspec.methods.eagle3.head import ParallelHead
from mmspec.visual_tokens.spans import ImageSpan

__all__ = ["Eagle3Drafter"]


class ParallelSession(GrownTreeSession):
    """A P-EAGLE head that predicts all levels of a tree in one forward pass, at mask rows after the root."""

    head: ParallelHead

    def propose(self, canvas: Canvas) -> Draft:
        growth = self.growth(canvas)
        hidden = self._read_ahead(canvas)  # [R, D, d] at the root and at the mask
        while not growth.is_grown:
            state = hidden[:, growth.level, None].expand(-1, growth.tokens.shape[1], -1)
            growth.grow(self._log_probabilities(self._logits(state, canvas.emitted + growth.level)))
        return self.rated(growth)

    def _read_ahead(self, canvas: Canvas) -> Tensor:
        """Read the newly committed tokens, and temporary mask rows after them."""
        self.prepare()
        mask = self.shape.depth - 1
        places = self.accepted[:, None] + torch.arange(mask + 1, device=self.tokens.device)
        ahead = torch.full_like(places, self.head.config.mask_token)
        ahead[:, 0] = canvas.root
        tokens = pad(self.tokens, (0, mask)).scatter(1, places, ahead)
        features = pad(self.features, (0, 0, 0, mask))
        places = self._copied(places)
        index = places[:, 1:, None].expand(-1, -1, features.shape[-1])
        features = features.scatter(1, index, self.head.mask_feature.to(features).expand(index.shape))
        hidden = self._read(features, Tree.chain(tokens, DraftKind.POINT).nodes)
        self._keep(self._copied(self.accepted), tokens.shape[1])
        return pick(hidden, places)

    def _embedded(
        self,
        prompts: Sequence[Mapping[str, Tensor]],
        spans: Sequence[Sequence[ImageSpan]],
        embeddings: Tensor,
    ) -> Tensor:
        ids = pad_sequence([prompt["input_ids"][0] for prompt in prompts], batch_first=True)
        own = self.head.embed(ids.to(embeddings.device), lambda _: embeddings)
        seen = torch.zeros_like(embeddings[..., :1], dtype=torch.bool)
        for row, found in enumerate(spans):
            for span in found:
                seen[row, span.start : span.stop] = True  # an image has no embedding of the head's own
        return embeddings.where(seen, own.to(embeddings))


def open_session(drafter: Eagle3Drafter, batch: PromptBatch) -> GrownTreeSession:
    """Open the session of a head that predicts one level in a forward pass, or all of them."""
    kind = ParallelSession if isinstance(drafter.model, ParallelHead) else GrownTreeSession
    return kind(drafter, batch)


class Eagle3Drafter(GrownTreeDrafter):
    """Drafts a tree as EAGLE does, with a head over hidden states of three depths (EAGLE-3, 2503.01840).

    A P-EAGLE head predicts all levels in one forward pass; a level does not depend on the tokens before it.

    Args: see `HeadDrafter`.
    """

    session = staticmethod(open_session)
