"""Loss of Falcon (2412.12639): EAGLE's, with coupled sequential glancing distillation.

The head predicts twice. In the second pass some blocks begin with the pair that they should predict, as many
as the first pass has errors to some share: the rest of a block learns to follow its own beginning.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmspec.heads.model import HIDDEN
from mmspec.methods.eagle.loss import EagleLoss, imitation
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.losses.base import learnt_pairs
from mmspec.training.losses.goals import agrees
from mmspec.validation import require_number
from mmspec_extras.methods.falcon.head import FalconHead


class FalconLoss(EagleLoss):
    """Smooth L1 between hidden states and soft cross entropy, where some blocks see their beginning.

    Args:
        glance: number of these blocks, as a share of the wrong tokens. The paper lowers it from 0.4 to 0 in
            training; here it is constant, and the errors become fewer.

    Raises:
        InputError: `glance` is not a share.
    """

    head: FalconHead

    def __init__(self, head: FalconHead, target: CausalTarget, *, glance: float = 0.4) -> None:
        super().__init__(head, target)
        require_number("glance", glance, 0.0, 1.0, "must be a share from 0 to 1")
        self.glance = glance

    def forward(self, batch: DrafterBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss and figures, as `EagleLoss` does."""
        reading, block = self.read(batch), self.head.config.block
        pairs = self.head.pairs(reading.prompts(self.noisy(reading, batch.seed)))  # [B, M, 2d]
        place = torch.arange(pairs.shape[1], device=pairs.device)
        offset = (place + batch.seed) % block
        start, root = place - offset, place - offset + 1  # of each block: its first row, its last token
        size = reading.learnt.shape[1]
        learnt = learnt_pairs(reading.learnt, block)[:, root.clamp(0, size - 1), offset]
        learnt = learnt & (root > 0) & (root < size)  # [B, M]
        row, at = learnt.nonzero(as_tuple=True)
        goal = self.meant(reading, (row, at + 1))  # a row predicts the state at the token after its place
        with torch.no_grad():
            wrong = torch.zeros_like(learnt)
            guessed = self.read_out(self._predict(pairs, start)[learnt])
            wrong[learnt] = ~agrees(guessed, goal.meant())
        first = learnt & (offset == 0)
        generator = torch.Generator(first.device).manual_seed(batch.seed)
        order = torch.rand(first.shape, generator=generator, device=first.device).masked_fill(~first, 2.0)
        seen = first & (order.argsort(-1).argsort(-1) < self.glance * wrong.sum(-1, keepdim=True))
        predicted = self._predict(pairs.roll(-block, 1).where(seen[..., None], pairs), start)
        left = learnt & ~seen
        row, at = left.nonzero(as_tuple=True)
        goal = replace(goal, at=goal.at[left[learnt]])
        true = reading.taps[HIDDEN][row, at + 1]
        return imitation(predicted[left], true, self.read_out(predicted[left]), goal)

    def _predict(self, pairs: Tensor, start: Tensor) -> Tensor:
        """States [B, M, d] predicted from pairs [B, M, 2d] in blocks that begin at `start` [M]."""
        rows, _ = self.head.run(pairs)
        mask = (start[:, None] >= start)[None, None]  # a block sees itself
        hidden: Tensor = self.head(rows, torch.arange(len(start), device=start.device)[None], mask)
        return hidden
