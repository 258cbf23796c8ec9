"""Loss of Hydra's heads, which learn the target's distributions after the root and the tokens since."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.models.feature_head import HIDDEN
from mmspec.models.hydra import HydraHead
from mmspec.targets import CausalTarget
from mmspec.training.losses.levels import Blocks, LevelLoss
from mmspec.training.teacher import Reading

__all__ = ["HydraLoss"]


class HydraLoss(LevelLoss):
    """The loss of Hydra's heads (2402.05109, section 4: distillation).

    Args:
        discount: weight of head i is discount^i; the paper has 1.
    """

    def __init__(self, head: HydraHead, target: CausalTarget, *, discount: float = 1.0) -> None:
        super().__init__(head, target)
        self.discount = discount

    def logits(self, reading: Reading, blocks: Blocks) -> Tensor:
        states = reading.taps[HIDDEN]
        places = torch.arange(states.shape[1], device=states.device)[None]
        hidden = self.head(states, places)[blocks.row, blocks.before]
        path = self.target.embed(reading.tokens[blocks.row[:, None], blocks.ahead])  # [m, K, d]
        paths = (path[:, : head + 1] for head in range(path.shape[1]))
        return torch.stack([self.head.predict(hidden, each, self.target.head) for each in paths], 1)
