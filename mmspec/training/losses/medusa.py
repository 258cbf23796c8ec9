"""What Medusa's heads learn: the tokens after the root, from the hidden state before it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from mmspec.models.feature_head import HIDDEN
from mmspec.models.medusa import MedusaHead
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.teacher import learnt_pairs, read

__all__ = ["Blocks", "MedusaLoss", "hit_rates", "token_loss"]


@dataclass(frozen=True)
class Blocks:
    """The places that roots can have in a batch, and what K heads have to learn there.

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
        """Of a batch whose learnt tokens are [B, L], for K heads."""
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


class Judged(Protocol):
    """The loss of several heads."""

    def judge(self, batch: DrafterBatch) -> tuple[Tensor, Tensor, Tensor]: ...


@torch.no_grad()
def hit_rates(learner: Judged, batches: Iterable[DrafterBatch], ranks: int = 10) -> list[list[float]]:
    """By head and rank, how often the goal's token is found there."""
    hits, places = torch.zeros(()), torch.zeros(())
    for batch in batches:
        logits, goal, counted = learner.judge(batch)
        meant = goal if goal.dim() == 2 else goal.argmax(-1)
        likeliest = logits.topk(min(ranks, logits.shape[-1])).indices
        found = (likeliest == meant[..., None]) & counted[..., None]
        hits, places = hits + found.sum(0).cpu(), places + counted.sum(0).cpu()
    rates: list[list[float]] = (hits / places.clamp_min(1)[..., None]).tolist()
    return [[round(rate, 4) for rate in each] for each in rates]


class MedusaLoss(nn.Module):
    """The loss of Medusa's heads on sequences that their target reads (Medusa-1: the target is frozen).

    Args:
        head: learns.
        target: does not; its output matrix is used as it is.
        soft: learn what the target would say of each place, not only the token that is there; the release
            has the tokens.
        discount: weight of head i is discount^i; 2401.10774, section 3.2 has 0.8.
    """

    def __init__(
        self, head: MedusaHead, target: CausalTarget, *, soft: bool = True, discount: float = 0.8
    ) -> None:
        super().__init__()
        self.head = head
        self.target = target  # no module: neither trained nor saved
        self.soft, self.discount = soft, discount

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and figures: how often each head's likeliest token is right."""
        loss, agreement = token_loss(*self.judge(batch), self.discount)
        return loss, {"agreement": agreement}

    def judge(self, batch: DrafterBatch) -> tuple[Tensor, Tensor, Tensor]:
        """What the heads say, what they should say, and where that counts, as `token_loss` takes it."""
        heads = self.head.config.num_heads
        reading = read(self.target, batch.examples, (HIDDEN,))
        states, blocks = reading.taps[HIDDEN], Blocks.of(reading.learnt, heads)
        logits = self.head.logits(self.head(states[blocks.row, blocks.before], heads), self.target.head)
        at = blocks.row[:, None], blocks.ahead
        if self.soft:
            return logits, self.target.head(states[at]).float().softmax(-1), blocks.counted
        following = reading.tokens.roll(-1, 1)  # of what counts, none is at the end
        return logits, following[at], blocks.counted
