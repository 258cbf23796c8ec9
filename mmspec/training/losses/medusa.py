"""Loss of Medusa's heads, which learn the tokens after the root from the hidden state before it."""

from __future__ import annotations

from torch import Tensor

from mmspec.models.feature_head import HIDDEN
from mmspec.models.medusa import MedusaHead
from mmspec.targets import CausalTarget
from mmspec.training.losses.levels import Blocks, LevelLoss
from mmspec.training.teacher import Reading

__all__ = ["MedusaLoss"]


class MedusaLoss(LevelLoss):
    """The loss of Medusa's heads (Medusa-1: the target is frozen).

    Args:
        soft: learn what the target would say of each place, not only the token that is there; the release
            has the tokens.
        discount: weight of head i is discount^i; 2401.10774, section 3.2 has 0.8.
    """

    def __init__(
        self, head: MedusaHead, target: CausalTarget, *, soft: bool = True, discount: float = 0.8
    ) -> None:
        super().__init__(head, target)
        self.soft, self.discount = soft, discount

    def logits(self, reading: Reading, blocks: Blocks) -> Tensor:
        states = self.head(reading.taps[HIDDEN][blocks.row, blocks.before], blocks.ahead.shape[1])
        logits: Tensor = self.head.logits(states, self.target.head)
        return logits
