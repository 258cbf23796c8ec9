"""Loss of Hydra's heads."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.heads.model import HIDDEN
from mmspec.methods.hydra.head import HydraHead
from mmspec.targets import CausalTarget
from mmspec.training.losses.base import Blocks, Reading
from mmspec.training.losses.levels import StateLoss

__all__ = ["HydraLoss"]


class HydraLoss(StateLoss):
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
        paths = [path[:, : head + 1] for head in range(path.shape[1])]
        if self.head.lm_heads:
            return torch.stack([self.head.predict(hidden, each, self.read_out) for each in paths], 1)
        # one product with the output matrix for all heads: its result is large, and stacking would copy it
        return self.read_out(torch.stack([self.head.predict(hidden, each, same) for each in paths], 1))


def same(state: Tensor) -> Tensor:
    """Return a state unchanged, in place of its logits."""
    return state
