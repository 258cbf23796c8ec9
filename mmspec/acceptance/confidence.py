"""Low-confidence remasking: the most confident places are decided, all others stay masked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.decoding.distribution import Scores
from mmspec.decoding.draft import Block, Draft, DraftKind, Tree
from mmspec.decoding.interfaces import AcceptanceRule, TargetOutput
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.verdict import Fill, Measured, Path, Verdict
from mmspec.errors import InputError
from mmspec.validation import is_integer


@dataclass(frozen=True)
class LowConfidence(AcceptanceRule):
    """Choose a token at every open place, and decide the places whose tokens are the most probable.

    Low-confidence remasking (LLaDA, 2502.09992, section 2.4; MaskGIT, 2202.04200). The confidence is the
    probability of the chosen token in the promised distribution, that is after temperature and truncation,
    where the paper's is at temperature 1. Each row ranks its own places; of equals the leftmost is decided.

    Lossy, without a bound: tokens decided in one round are chosen independently of each other, and at
    temperatures above 0 places are selected by what was drawn at them, which favours probable tokens. The
    model defines no order, so there is no distribution of whole outputs to be exact to. Greedy output with
    one place a step is that of the paper's procedure with as many steps as places.

    Args:
        places_per_step: places of each row that a round decides; the paper's length of a block by its steps.

    Raises:
        InputError: it is not a positive integer.
    """

    places_per_step: int = 1

    sound_for = frozenset({DraftKind.POINT})
    judges = "places"
    exactness = "lossy"

    def __post_init__(self) -> None:
        if not is_integer(self.places_per_step) or self.places_per_step < 1:
            raise InputError("places_per_step", self.places_per_step, "a positive integer")

    def decide(
        self, draft: Draft, output: TargetOutput, scores: Scores, random: RandomStream, first: Tensor
    ) -> tuple[Verdict, Measured]:
        if not isinstance(draft, Block):
            raise TypeError("confidence ranks open places against each other; a tree of candidates has none")
        token = scores.choose(draft.lanes, random, first)
        # of the logits as they are: probabilities of greedy decoding are 1 everywhere
        confidence = scores.logits.softmax(-1).gather(-1, token[:, :, None])[:, 0, 0]
        is_open = draft.is_open[:, :, 0]
        ranked = confidence.view_as(is_open).masked_fill(~is_open, -1.0)
        order = ranked.argsort(dim=-1, descending=True, stable=True)
        chosen = (order.argsort(-1) < self.places_per_step) & is_open
        failed = is_open & ~scores.is_finite().view_as(is_open)
        decided, values = chosen & ~failed, token.view_as(is_open)
        fill = Fill.of(draft.starts, values, decided, torch.zeros_like(decided), failed.any(-1))
        return fill, Measured.nothing(is_open)

    def verify(self, draft: Tree, scores: Scores, random: RandomStream, emitted: Tensor) -> Path:
        raise TypeError("confidence ranks open places against each other; a tree of candidates has none")
