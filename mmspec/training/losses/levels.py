"""Losses of heads that each predict the token of one level of the tree."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable

import torch
from torch import Tensor

from mmspec.open_types import Json
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.losses.base import Blocks, DrafterLoss, Reading, token_loss
from mmspec.training.losses.goals import Goals, index_among

__all__ = ["LevelLoss", "StateLoss", "hit_rates"]


class LevelLoss(DrafterLoss):
    """The cross-entropy of several heads, one for each level.

    Attributes:
        discount: weight of head i is discount^i.
    """

    discount: float

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and figures: how often each head's likeliest token is right."""
        logits, goal, counted, known = self.judge(batch)
        loss, agreement = token_loss(logits, goal, counted & known, self.discount)
        return loss, {"agreement": agreement}

    @abstractmethod
    def judge(self, batch: DrafterBatch) -> tuple[Tensor, Tensor | Goals, Tensor, Tensor]:
        """Logits of the heads and their goals, as `token_loss` takes them; which places are learnt, [m, K].

        And which of all places have a goal whose likeliest token is one that the heads draft.
        """

    def measure(self, batches: Iterable[DrafterBatch]) -> Json:
        """Measure how often each rank of each head is right, for static trees."""
        return {"hit_rates": hit_rates(self, batches)}


class StateLoss(LevelLoss):
    """The loss of heads that read the target's hidden state before each root.

    Attributes:
        soft: whether they learn what the target would say of each place, not only the token that is there.
    """

    soft = True

    def judge(self, batch: DrafterBatch) -> tuple[Tensor, Tensor | Goals, Tensor, Tensor]:
        reading = self.read(batch)
        blocks = Blocks.of(reading.learnt, self.head.config.num_heads)
        at = blocks.row[:, None], blocks.ahead
        goal: Tensor | Goals
        if self.soft:
            goal = self.goals(reading, at, blocks.counted)
            known = goal.known[goal.at]
        else:  # of what counts, none is at the end
            goal, known = index_among(self.head.draft_tokens, reading.tokens.roll(-1, 1)[at])
        return self.logits(reading, blocks), goal, blocks.counted, known

    @abstractmethod
    def logits(self, reading: Reading, blocks: Blocks) -> Tensor:
        """[m, K, V or V'] logits of the heads in the blocks."""


@torch.no_grad()
def hit_rates(learner: LevelLoss, batches: Iterable[DrafterBatch], ranks: int = 10) -> list[list[float]]:
    """Measure by head and rank how often the goal's token is found there; never one that is not drafted."""
    hits, places = torch.zeros(()), torch.zeros(())
    for batch in batches:
        logits, goal, counted, known = learner.judge(batch)
        meant = goal.meant() if isinstance(goal, Goals) else goal
        likeliest = logits.topk(min(ranks, logits.shape[-1])).indices
        found = (likeliest == meant[..., None]) & (counted & known)[..., None]
        hits, places = hits + found.sum(0).cpu(), places + counted.sum(0).cpu()
    rates: list[list[float]] = (hits / places.clamp_min(1)[..., None]).tolist()
    return [[round(rate, 4) for rate in each] for each in rates]
