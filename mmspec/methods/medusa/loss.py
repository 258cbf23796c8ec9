"""Loss of Medusa's heads."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.heads.model import HIDDEN
from mmspec.methods.medusa.head import MedusaHead
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterData
from mmspec.training.losses.base import Blocks, Reading
from mmspec.training.losses.levels import StateLoss

__all__ = ["MedusaLoss"]


class MedusaLoss(StateLoss):
    """The loss of Medusa's heads (Medusa-1: the target is frozen).

    Args:
        soft: train on the target's distribution at each place, instead of the tokens alone as in the release.
        discount: weight of head i is discount^i; 2401.10774, section 3.2 has 0.8.
    """

    outer = ("distance", "sharpness")  # tables of numbers, not matrices of a layer

    def __init__(
        self, head: MedusaHead, target: CausalTarget, *, soft: bool = True, discount: float = 0.8
    ) -> None:
        super().__init__(head, target)
        self.soft, self.discount = soft, discount

    def logits(self, reading: Reading, blocks: Blocks) -> Tensor:
        if self.head.config.listens:
            features = torch.cat([reading.taps[tap] for tap in self.head.taps], -1)
            roots = self.target.embed(reading.tokens.roll(-1, 1))  # none follows the last position
            read = self.head.listener(features, roots, *self.head.listener.read(reading.encoded))
            states = read[blocks.row, blocks.before]
        else:
            states = self.head(reading.taps[HIDDEN][blocks.row, blocks.before], blocks.ahead.shape[1])
        logits: Tensor = self.head.logits(states, self.read_out)
        return logits

    @staticmethod
    def prepare(head: MedusaHead, data: DrafterData, target: CausalTarget) -> None:
        StateLoss.prepare(head, data, target)
        if head.config.listens:
            head.listener.imitate(target)
