"""EAGLE: a one-layer head on the target's hidden states grows a tree of candidates.

EAGLE-1 (Li et al., 2401.15077) with static trees, EAGLE-2 (2406.16858) with dynamic ones, LANTERN
(2410.03355) for images, EAGLE-3 (2503.01840) with another head. EAGLE-1 draws the candidates of its tree
without replacement when it samples (`sampling="without_replacement"`); by default ours are the likeliest
ones, for which `sample_and_match` is exact.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft, DraftKind, Tree
from mmspec.decoding.image_grid import Grammar, exclude
from mmspec.decoding.indexing import pick
from mmspec.decoding.rows import named
from mmspec.drafters.feature_session import FeatureDrafter, FeatureSession
from mmspec.drafters.session import PromptBatch
from mmspec.models.eagle3 import ParallelHead
from mmspec.visual_tokens.spans import find_images
from mmspec.visual_tokens.splice import PromptRows

__all__ = ["Eagle3Drafter", "EagleDrafter", "MtpDrafter"]


class EagleSession(FeatureSession):
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


class ParallelSession(EagleSession):
    """A P-EAGLE head that predicts all levels of a tree in one pass, by rows of a mask behind the root."""

    head: ParallelHead

    def propose(self, canvas: Canvas) -> Draft:
        growth = self.growth(canvas)
        hidden = self._read_ahead(canvas)  # [R, D, d] at the root and at the mask
        while not growth.is_grown:
            state = hidden[:, growth.level, None].expand(-1, growth.tokens.shape[1], -1)
            growth.grow(self._log_probabilities(self._logits(state, canvas.emitted + growth.level)))
        return self.rated(growth)

    def _read_ahead(self, canvas: Canvas) -> Tensor:
        """Read what was committed since the last time, and a mask behind it, which is not kept."""
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
        self._keep(canvas, self._copied(self.accepted), tokens.shape[1])
        return pick(hidden, places)

    def _prompt_rows(self, prompt: Mapping[str, Tensor], embeddings: Tensor, features: Tensor) -> PromptRows:
        own = self.head.embed(prompt["input_ids"].to(embeddings.device), lambda _: embeddings)
        seen = torch.zeros_like(embeddings[..., :1], dtype=torch.bool)
        for span in find_images(self.target.config, prompt):
            seen[:, span.start : span.stop] = True  # of an image there is no token that it could embed
        return super()._prompt_rows(prompt, embeddings.where(seen, own.to(embeddings)), features)


def open_session(drafter: Eagle3Drafter, batch: PromptBatch) -> EagleSession:
    """Open the session for a head that predicts a level in a pass, or all of them."""
    kind = ParallelSession if isinstance(drafter.model, ParallelHead) else EagleSession
    return kind(drafter, batch)


class EagleDrafter(FeatureDrafter):
    """A tree of continuations by a head that predicts the target's hidden states.

    Args: as of `HeadDrafter`.
    """

    title = "an EAGLE head"
    session: Callable[..., EagleSession] = EagleSession


class Eagle3Drafter(EagleDrafter):
    """As EAGLE, by a head that reads hidden states of three depths (EAGLE-3, 2503.01840).

    A P-EAGLE head predicts all levels in one pass, each independent of what the levels before it chose.

    Args: as of `HeadDrafter`.
    """

    title = "an EAGLE-3 head"
    session = staticmethod(open_session)


class MtpDrafter(EagleDrafter):
    """As EAGLE, by the layer that the target was trained with for multi-token prediction (2412.19437).

    Args: as of `HeadDrafter`.
    """

    title = "an MTP head"
