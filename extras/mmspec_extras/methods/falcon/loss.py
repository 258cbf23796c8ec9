"""Loss of Falcon (2412.12639): EAGLE's, with coupled sequential glancing distillation.

The head predicts twice. After the first pass, some of its wrong blocks begin with the pairs that they should
predict: the rest of such a block learns to follow its own first tokens (section 3.1).
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from mmspec.heads.model import HIDDEN
from mmspec.methods.eagle.loss import EagleLoss, imitation
from mmspec.targets import CausalTarget
from mmspec.targets.attention import mask_dtype
from mmspec.training.data.sequences import DrafterBatch
from mmspec.training.losses.base import learnt_pairs
from mmspec.training.losses.goals import agrees
from mmspec.validation import require_number
from mmspec_extras.methods.falcon.head import FalconHead

__all__ = ["FalconLoss"]


class FalconLoss(EagleLoss):
    """Smooth L1 between hidden states and soft cross entropy, in blocks of which some see their beginning.

    Args:
        glance: number of blocks that see it, as a share of the tokens that the head predicts wrongly. The
            paper lowers it from 0.4 to 0 in training; here it is constant, and the errors become fewer.

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
        seen = self._seen(learnt, wrong, offset, batch.seed)
        predicted = self._predict(pairs.roll(-block, 1).where(seen[..., None], pairs), start)
        left = learnt & ~seen
        row, at = left.nonzero(as_tuple=True)
        goal = replace(goal, at=goal.at[left[learnt]])
        true = reading.taps[HIDDEN][row, at + 1]
        return imitation(predicted[left], true, self.read_out(predicted[left]), goal)

    def _predict(self, pairs: Tensor, start: Tensor) -> Tensor:
        """States [B, M, d] predicted from pairs [B, M, 2d] in blocks that begin at `start` [M]."""
        rows, _ = self.head.run(pairs)
        mask = (start[:, None] >= start).expand(len(rows), 1, -1, -1)  # a block sees itself
        if (additive := mask_dtype(self.head.decoder)) is not None:
            mask = torch.zeros(mask.shape, dtype=additive, device=mask.device).masked_fill(~mask, -torch.inf)
        hidden: Tensor = self.head(rows, torch.arange(len(start), device=start.device)[None], mask)
        return hidden

    def _seen(self, learnt: Tensor, wrong: Tensor, offset: Tensor, seed: int) -> Tensor:
        """[B, M] rows at the beginning of random blocks, which read the pairs that they should predict.

        Args:
            learnt, wrong: [B, M] rows whose predictions count, and those among them that are wrong.
            offset: [M] of each row in its block.
            seed: of the random numbers.
        """
        generator = torch.Generator(learnt.device).manual_seed(seed)
        order, share = torch.rand(2, *learnt.shape, generator=generator, device=learnt.device)
        first = learnt & (offset == 0)
        rank = order.masked_fill(~first, 2.0).argsort(-1).argsort(-1)
        chosen = first & (rank < self.glance * wrong.sum(-1, keepdim=True))
        length = chosen * (1 + (share * (self.head.config.block - 1)).long())  # 1 to k - 1 rows
        start = (torch.arange(len(offset), device=offset.device) - offset).clamp_min(0)
        return learnt & (offset < length[:, start])
