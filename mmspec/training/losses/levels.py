"""Losses of heads that each predict the token of one tree level, such as Medusa heads."""

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
    """Cross-entropy of several heads, one for each tree level.

    Attributes:
        discount: head i has the weight discount^i.
    """

    discount: float

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and how often each head's likeliest token is right."""
        logits, goal, counted, known = self.judge(batch)
        loss, agreement = token_loss(logits, goal, counted & known, self.discount)
        return loss, {"agreement": agreement}

    @abstractmethod
    def judge(self, batch: DrafterBatch) -> tuple[Tensor, Tensor | Goals, Tensor, Tensor]:
        """Return logits and goals for `token_loss`, and two masks [m, K].

        The first mask is True where a token is learnt, the second where the heads draft the goal's likeliest.
        """

    def measure(self, batches: Iterable[DrafterBatch]) -> Json:
        """Measure the hit rate of each rank of each head, for static trees."""
        return {"hit_rates": hit_rates(self, batches)}


class StateLoss(LevelLoss):
    """Base class of the losses of heads that read the target's hidden state before each root.

    Attributes:
        soft: whether the heads learn the target's distribution, instead of the token of the data.
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
        else:  # the last position never counts, so that rolling is safe
            goal, known = index_among(self.head.draft_tokens, reading.tokens.roll(-1, 1)[at])
        return self.logits(reading, blocks), goal, blocks.counted, known

    @abstractmethod
    def logits(self, reading: Reading, blocks: Blocks) -> Tensor:
        """Return the logits [m, K, V or V'] of the heads in the blocks."""


@torch.no_grad()
def hit_rates(learner: LevelLoss, batches: Iterable[DrafterBatch], ranks: int = 10) -> list[list[float]]:
    """Measure, by head and rank, how often the goal's token has that rank; undrafted tokens never do."""
    hits, places = torch.zeros(()), torch.zeros(())
    for batch in batches:
        logits, goal, counted, known = learner.judge(batch)
        meant = goal.meant() if isinstance(goal, Goals) else goal
        likeliest = logits.topk(min(ranks, logits.shape[-1])).indices
        found = (likeliest == meant[..., None]) & (counted & known)[..., None]
        hits, places = hits + found.sum(0).cpu(), places + counted.sum(0).cpu()
    rates: list[list[float]] = (hits / places.clamp_min(1)[..., None]).tolist()
    return [[round(rate, 4) for rate in each] for each in rates]
