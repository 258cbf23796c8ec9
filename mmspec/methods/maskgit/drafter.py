"""Drafter of MaskGIT: all open cells of an image are drafted in each forward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from mmspec.core.canvas import Canvas
from mmspec.core.draft import Draft
from mmspec.core.interfaces import DraftSession, TargetOutput
from mmspec.core.promise import Level
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Fill
from mmspec.errors import InputError
from mmspec.families.parallel_images.cells import CellsDrafter, group_of, layout_of
from mmspec.families.parallel_images.orders import cells_by_forward
from mmspec.families.parallel_images.target import CellGroup
from mmspec.methods.maskgit.policy import MaskGIT
from mmspec.validation import is_integer

__all__ = ["MaskGITDrafter"]


class MaskGITSession(DraftSession):
    """Images of which all open cells are drafted; the rule decides the surest of them.

    Attributes:
        counts: number of cells that each forward pass decides.
        fresh: [B, k] cells that the last forward pass decided.
    """

    def __init__(self, drafter: MaskGITDrafter, batch: PromptBatch) -> None:
        self.layout, device = layout_of(batch.requests), batch.prefill.logits.device
        self.counts = drafter.counts(self.layout.cells)
        self.place = torch.arange(self.layout.cells, device=device).expand(len(batch.requests), -1)
        self.fresh = self.place[:, :0]
        self.forwards = 0

    def open(self, canvas: Canvas) -> Draft:
        canvas.reserve(2 * self.layout.cells)
        nothing = self.place[:, :0]
        return group_of(canvas, self.layout, nothing, nothing, nothing, nothing, 0, 0, self.layout.cells)

    def propose(self, canvas: Canvas) -> Draft:
        begin, quota = sum(self.counts[: self.forwards]), self.counts[self.forwards]
        self.forwards += 1
        cells = self.layout.cells
        decided = canvas.decided[:, :cells].scatter(1, self.fresh, False)
        order = canvas.decided[:, :cells].long().argsort(dim=1, stable=True)
        open_cells = order[:, : cells - begin]
        ranks = torch.full_like(open_cells, begin)
        before = self.place.where(decided, cells)
        return group_of(canvas, self.layout, open_cells, self.fresh, before, ranks, begin, quota, cells)

    def observe(self, draft: CellGroup, output: TargetOutput, scores: Any, verdict: Fill) -> None:
        # the same number in every row, except in finished rows
        chosen = verdict.decided.long().argsort(dim=1, descending=True, stable=True)[:, : draft.quota]
        self.fresh = verdict.places.gather(1, chosen)


class MaskGITDrafter(CellsDrafter):
    """Drafts all open cells, of which `MaskGIT` decides the surest (MaskGIT, 2202.04200).

    Args:
        iterations: forward passes of an image, 1 or more; the numbers of cells follow a cosine.

    Raises:
        InputError: `iterations` is not a positive integer.
    """

    exactness = Level.LOSSY
    judged_by = MaskGIT
    name = "maskgit"
    session: Callable[..., DraftSession] = MaskGITSession

    def __init__(self, iterations: int = 12) -> None:
        if not is_integer(iterations) or iterations < 1:
            raise InputError("iterations", iterations, "must be a positive integer")
        self.iterations = iterations

    def counts(self, cells: int) -> list[int]:
        """Return the number of cells that each forward pass decides."""
        return cells_by_forward(cells, min(self.iterations, cells))
