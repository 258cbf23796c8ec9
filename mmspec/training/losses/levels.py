"""Losses of heads that each predict the token of one level of the tree (Medusa, Hydra); blocks of tokens."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmspec.models.feature_head import HIDDEN
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.losses.base import DrafterLoss
from mmspec.training.teacher import Reading, learnt_pairs

__all__ = ["Blocks", "LevelLoss", "hit_rates", "token_loss"]


@dataclass(frozen=True)
class Blocks:
    """The roots that a batch can have, and the tokens that K heads learn after each.

    Attributes:
        row: [m] of the batch.
        before: [m] place of the token before each root, whose hidden state is read.
        ahead: [m, K] places of the root and of the tokens after it; head i predicts what follows the i-th.
        counted: [m, K] which of those are learnt; other places are cut to lie within the batch.
    """

    row: Tensor
    before: Tensor
    ahead: Tensor
    counted: Tensor

    @classmethod
    def of(cls, learnt: Tensor, heads: int) -> Blocks:
        """The blocks of K heads in a batch whose learnt tokens are [B, L]."""
        counted = learnt_pairs(learnt, heads)
        counted[:, 0] = False  # no hidden state before it
        row, root = counted[..., 0].nonzero(as_tuple=True)
        ahead = root[:, None] + torch.arange(heads, device=root.device)
        return cls(row, root - 1, ahead.clamp_max(learnt.shape[1] - 1), counted[row, root])


def token_loss(logits: Tensor, goal: Tensor, counted: Tensor, discount: float) -> tuple[Tensor, Tensor]:
    """Cross-entropy of what K heads predict, averaged over the tokens that count.

    Args:
        logits: [m, K, V].
        goal: [m, K] tokens, or [m, K, V] the distributions that a teacher has of them.
        counted: [m, K].
        discount: weight of head i is discount^i.

    Returns:
        The loss; and [K] how often each head's likeliest token is the goal's.
    """
    heads = counted.shape[1]
    weights = counted * discount ** torch.arange(heads, device=counted.device)
    nats = cross_entropy(logits.float().flatten(0, 1), goal.flatten(0, 1), reduction="none")
    meant = goal if goal.dim() == 2 else goal.argmax(-1)
    agreement = ((logits.argmax(-1) == meant) & counted).sum(0) / counted.sum(0).clamp_min(1)
    return (nats.view_as(weights) * weights).sum() / weights.sum().clamp_min(1.0), agreement


class LevelLoss(DrafterLoss):
    """The cross-entropy of several heads, one for each level.

    Attributes:
        discount: weight of head i is discount^i.
        soft: whether they learn what the target would say of each place, not only the token that is there.
    """

    discount: float
    soft = True

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and figures: how often each head's likeliest token is right."""
        loss, agreement = token_loss(*self.judge(batch), self.discount)
        return loss, {"agreement": agreement}

    def judge(self, batch: DrafterBatch) -> tuple[Tensor, Tensor, Tensor]:
        """Logits of the heads, their goals, and which of those count, as `token_loss` takes them."""
        reading = self.read(batch)
        blocks = Blocks.of(reading.learnt, self.head.config.num_heads)
        at = blocks.row[:, None], blocks.ahead
        if self.soft:
            goal = self.target.head(reading.taps[HIDDEN][at]).float().softmax(-1)
        else:
            goal = reading.tokens.roll(-1, 1)[at]  # of what counts, none is at the end
        return self.logits(reading, blocks), goal, blocks.counted

    @abstractmethod
    def logits(self, reading: Reading, blocks: Blocks) -> Tensor:
        """[m, K, V] logits of the heads in the blocks."""

    def measure(self, batches: Iterable[DrafterBatch]) -> dict[str, Any]:
        """Measure how often each rank of each head is right, for static trees."""
        return {"hit_rates": hit_rates(self, batches)}


@torch.no_grad()
def hit_rates(learner: LevelLoss, batches: Iterable[DrafterBatch], ranks: int = 10) -> list[list[float]]:
    """Measure by head and rank how often the goal's token is found there."""
    hits, places = torch.zeros(()), torch.zeros(())
    for batch in batches:
        logits, goal, counted = learner.judge(batch)
        meant = goal if goal.dim() == 2 else goal.argmax(-1)
        likeliest = logits.topk(min(ranks, logits.shape[-1])).indices
        found = (likeliest == meant[..., None]) & counted[..., None]
        hits, places = hits + found.sum(0).cpu(), places + counted.sum(0).cpu()
    rates: list[list[float]] = (hits / places.clamp_min(1)[..., None]).tolist()
    return [[round(rate, 4) for rate in each] for each in rates]
