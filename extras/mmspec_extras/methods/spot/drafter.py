"""Drafts of a masked block's states in the order that a trained network predicts (after SPOT, 2610.22543)."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from mmspec.core.distributions import Scores
from mmspec.core.interfaces import Target
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.methods.freedave.drafter import StatesDrafter, StatesSession
from mmspec.places.policies import rank
from mmspec.places.state_walk import StateFill
from mmspec_extras.methods.learned.filter import CommitFilter
from mmspec_extras.trained import copied_to, read_trained


class OrderedStatesSession(StatesSession):
    """States of the blocks of a batch, in the order that a network predicts."""

    def __init__(self, drafter: OrderedStatesDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.head: Any = drafter.head

    def guess(self, scores: Scores, verdict: StateFill) -> tuple[Tensor, Tensor]:
        seen = verdict.seen
        ranked = rank(self.head(seen.confidence.where(seen.is_open, 1.0)))
        if not self.draws_anew(scores):
            return ranked, seen.token
        ranked = rank(-ranked.masked_fill(~verdict.leaves, ranked.shape[1]).double())
        return ranked, self.draws(scores, verdict)(ranked)


class OrderedStatesDrafter(StatesDrafter):
    """Predicts the next places of a block with a network, and drafts the states that follow.

    Args:
        head: folder of a `CommitFilter` that was trained on the order of places (`mmspec-extras train-filter
            --learn order`), or a loaded one.
        states: see `StatesDrafter`.

    Raises:
        InputError: `states` is out of range; in `fit`, if there is no head.
        CheckpointError: the head cannot be read.
    """

    session = OrderedStatesSession

    def __init__(self, head: Any = None, states: int = 8) -> None:
        super().__init__(states)
        self.head = None if head is None else read_trained(CommitFilter, head, "head", "filter")

    def fit(self, target: Target[Any]) -> Self:
        fitted = super().fit(target)
        fitted.head = copied_to(target.device, self.head, "head", "filter")
        size, own = fitted.block_length or 1, fitted.head.config.block_length
        if own != size:
            raise InputError("head", own, f"must be trained for blocks of {size}")
        return fitted
