"""Sorted fine-tuning of nested exits (S2D, 2407.01955): each step trains one of them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch

from mmspec.core.interfaces import PromptOutput
from mmspec.training.data.sequences import DrafterBatch
from mmspec_extras.methods.early_exit.exits import first_layers, stack_of
from mmspec_extras.methods.early_exit.loss import LayersLoss
from mmspec_extras.methods.s2d.head import SortedExits


class SortedExitsLoss(LayersLoss):
    """The loss of an exit that is drawn in each step; in the mean, that of all exits.

    Args:
        cuts, discount, length: see `LayersLoss`.
    """

    head: SortedExits

    def layers(self, batch: DrafterBatch, read: PromptOutput) -> AbstractContextManager[None]:
        exits, noise = self.head.config.exits, torch.Generator().manual_seed(batch.seed)
        exit = exits[int(torch.randint(len(exits), (), generator=noise))]
        model = self.target.model
        return first_layers(model, exit, self.head.beside(stack_of(model)[1][:exit]))
