"""What Hydra's heads learn: the target's distributions after the root, given the tokens in between."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from mmspec.models.feature_head import HIDDEN
from mmspec.models.hydra import HydraHead
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.losses.medusa import Blocks, token_loss
from mmspec.training.teacher import read

__all__ = ["HydraLoss"]


class HydraLoss(nn.Module):
    """The loss of Hydra's heads on sequences that their target reads (2402.05109, section 4: distillation).

    Args:
        head: learns.
        target: does not; its embeddings and output matrix are used as they are.
        discount: weight of head i is discount^i; the paper has 1.
    """

    def __init__(self, head: HydraHead, target: CausalTarget, *, discount: float = 1.0) -> None:
        super().__init__()
        self.head = head
        self.target = target  # no module: neither trained nor saved
        self.discount = discount

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and figures: how often each head's likeliest token is the target's."""
        loss, agreement = token_loss(*self.judge(batch), self.discount)
        return loss, {"agreement": agreement}

    def judge(self, batch: DrafterBatch) -> tuple[Tensor, Tensor, Tensor]:
        """What the heads say, what they should say, and where that counts, as `token_loss` takes it."""
        heads = self.head.config.num_heads
        reading = read(self.target, batch.examples, (HIDDEN,))
        states, blocks = reading.taps[HIDDEN], Blocks.of(reading.learnt, heads)
        places = torch.arange(states.shape[1], device=states.device)[None]
        hidden = self.head(states, places)[blocks.row, blocks.before]
        at = blocks.row[:, None], blocks.ahead
        path = self.target.embed(reading.tokens[at])  # [m, K, d]
        said = [self.head.predict(hidden, path[:, : head + 1], self.target.head) for head in range(heads)]
        distribution = self.target.head(states[at]).float().softmax(-1)
        return torch.stack(said, 1), distribution, blocks.counted
