"""Drafter of Medusa (2401.10774): one head for each level of the tree, all on one hidden state.

A head does not see the tokens of the others, so that the tree is a product of their distributions. One small
forward pass computes all levels, and nothing is cached. Acceptance is exact, unlike Medusa's typical
acceptance. Heads for a speech recogniser may attend to the output of its encoder, which they read once.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.distributions import Scores
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.indexing import take
from mmspec.core.interfaces import TargetOutput
from mmspec.core.rows import named
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Path
from mmspec.errors import InputError
from mmspec.heads.drafter import HeadSession, LevelDrafter, StateSession
from mmspec.methods.medusa.head import MedusaHead
from mmspec.open_types import Keywords
from mmspec.targets import AnyTarget
from mmspec.targets.encoder_decoder import ENCODED, EncoderDecoderTarget
from mmspec.trees.growth import draft_at_once, fixed

__all__ = ["MedusaDrafter"]


class MedusaGrowth(HeadSession):
    """A session whose heads predict all levels of the tree in one forward pass."""

    head: MedusaHead

    def grow(self, canvas: Canvas, predicted: Tensor) -> Draft:
        """Grow a tree from the states [R, D, d] that the heads predict."""
        self.passes += 1
        log_p = self._log_probabilities(self._guided(self.head.logits(predicted, self.read_out)))
        shape = fixed(self.shape)
        if shape is not None and self.drafter.kind is DraftKind.POINT:
            draft, self.likelihoods = draft_at_once(shape, canvas.root, log_p, self.names)
            return draft
        growth = self.growth(canvas)
        while not growth.is_grown:
            growth.grow(log_p[:, growth.level, None].expand(-1, growth.tokens.shape[1], -1))
        return self.rated(growth)


class MedusaSession(MedusaGrowth, StateSession):
    """Heads that read the target's last hidden state."""

    def propose(self, canvas: Canvas) -> Draft:
        return self.grow(canvas, self.head(self.hidden, self.shape.depth))


class ListeningSession(MedusaGrowth):
    """Heads that attend to the states of the target's encoder.

    Attributes:
        features: [R, 2 d] states of the target before the root.
        keys, values, present: of the encoder's states; see `EncoderAttention.read`.
    """

    row_fields = named("features", "keys", "values", "present")

    def __init__(self, drafter: MedusaDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        taps = [[states[:, -1] for states in batch.prefill.taps[tap]] for tap in self.head.taps]
        self.features = torch.cat([torch.cat(rows) for rows in taps], -1)
        known: Any = batch.prefill.cache
        self.keys, self.values, self.present = self.head.listener.read(
            [*map(encoded, known.inputs, known.visible)]
        )

    def propose(self, canvas: Canvas) -> Draft:
        root = self._copied(self.target.embed(canvas.root[:, None]))
        read = self.head.listener(self.features[:, None], root, self.keys, self.values, self.present)
        return self.grow(canvas, read[:, 0, : self.shape.depth])

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        last = self._copied(verdict.last)
        self.features = torch.cat([take(output.taps[tap], last) for tap in self.head.taps], -1)


def encoded(inputs: Keywords, visible: Tensor) -> Tensor:
    """The states [1, S, d] of an encoder that the decoder attends to in one row.

    Args:
        inputs: arguments of the model. Their mask may be of samples or frames, many for each state.
        visible: whether the decoder attends to each state, padded.
    """
    states: Tensor = inputs[ENCODED].last_hidden_state
    return states[:, visible[: states.shape[1]]]


def open_session(drafter: MedusaDrafter, batch: PromptBatch) -> MedusaGrowth:
    """Open the session of heads that read the target's states, or its encoder's too."""
    return (ListeningSession if drafter.model.config.listens else MedusaSession)(drafter, batch)


class MedusaDrafter(LevelDrafter):
    """Drafts a tree with heads that each predict one token.

    Args: see `LevelDrafter`.
    """

    session = staticmethod(open_session)
    model: MedusaHead

    def check(self, target: AnyTarget) -> None:
        super().check(target)
        config = self.model.config
        if config.listens and not (
            isinstance(target, EncoderDecoderTarget) and width_of(target) == config.hidden_size
        ):
            rule = (
                "needs an encoder-decoder whose encoder is as wide as its decoder: its heads attend to both"
            )
            raise InputError("drafter", self.title, rule)


def width_of(target: EncoderDecoderTarget) -> int:
    """Width of the states of a target's encoder."""
    return int(target.model.get_encoder().config.hidden_size)
