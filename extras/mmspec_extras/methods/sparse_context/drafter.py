"""Blocks of a clip that see only the first block and the most recent ones (BlockVid, 2511.22973)."""

from __future__ import annotations

from typing import Any, Self

from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.interfaces import Target
from mmspec.core.promise import Level
from mmspec.errors import InputError
from mmspec.families.parallel_images.cells import OrderedCellsDrafter, OrderedCellsSession
from mmspec.families.parallel_images.target import CellGroup
from mmspec.places.order import Groups
from mmspec.validation import is_integer
from mmspec_extras.families.nbp.target import NBPTarget, RecentBlocks


class RecentBlocksSession(OrderedCellsSession):
    """Clips whose blocks see only the first block and the most recent ones."""

    drafter: RecentBlocksDrafter

    def block(self, canvas: Canvas, places: Tensor, exists: Tensor, groups: Groups) -> CellGroup:
        group = super().block(canvas, places, exists, groups)
        return RecentBlocks(**vars(group), context_blocks=self.drafter.context_blocks)


class RecentBlocksDrafter(OrderedCellsDrafter):
    """Decides blocks of a clip, and keeps the keys of the first block and of the most recent ones.

    The sparse cache of BlockVid (2511.22973) retrieves the blocks with the most similar prompts. Here a clip
    has one prompt, so that blocks differ only by age.

    Args:
        context_blocks: number of most recent blocks that are kept, the newest included.

    Raises:
        InputError: `context_blocks` is not a positive integer.
    """

    name = "sparse_context"
    session = RecentBlocksSession

    def __init__(self, context_blocks: int = 16) -> None:
        super().__init__()
        if not is_integer(context_blocks) or context_blocks < 1:
            raise InputError("context_blocks", context_blocks, "must be a positive integer")
        self.context_blocks, self.exactness = context_blocks, Level.LOSSY

    def fit(self, target: Target[Any]) -> Self:
        if not isinstance(target, NBPTarget):
            raise InputError("accelerator", self.name, "needs a model of clips that predicts blocks (NBP)")
        fitted = self.fitted(target)
        fitted.exactness = Level.LOSSY
        return fitted
