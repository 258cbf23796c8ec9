"""Order in which a masked autoregressive model (MAR, 2406.11838) decides the cells of an image."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.annealing import StepAnnealing
from mmspec.decoding.canvas import Canvas, Stopping
from mmspec.decoding.draft import Cells, Draft, DraftKind, Progress
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import Drafter, DraftSession, Request, Target
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.errors import InputError
from mmspec.models.mar import FeatureCaching
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer

__all__ = ["CellOrder", "CellOrderSession", "cells_by_forward", "checkerboard_first"]

ORDERS = ("random", "checkerboard")
#: The distributions that a MAR's images are drawn from: they differ, as the cells of one forward are drawn
#: without knowing of each other.
TOGETHER = "the published iterations, cells of one forward independent of each other"
ONE_BY_ONE = "one cell a forward, each given all before it"


class CellOrder(Drafter):
    """Orders the cells of an image: a few in the first forwards, and more in later ones.

    The cells of one forward are drawn independently of each other, as the model was trained for; with as many
    forwards as cells, each is drawn given all before it.

    Args:
        iterations: forwards of an image; None is the published 64, or one for each cell if there are fewer.
        order: "random", or "checkerboard": the cells of one colour of a chessboard first, which fix the
            structure, then the others, which have neighbours on all sides (GtR, 2510.17171). Random within.
        last_steps: steps of the denoising head in the last forward, to which they fall from the first on
            (DiSA, 2505.20297); None for as many in all.
        annealing: how they fall: "linear", "cosine" or "two-stage".
        caching: settings of feature caching (LazyMAR, 2503.12450); None computes all in every forward.

    Raises:
        InputError: a value outside its range.
    """

    proposes = "vectors"
    max_nodes = 0  # beside the cells of the image

    def __init__(
        self,
        iterations: int | None = None,
        order: str = "random",
        last_steps: int | None = None,
        annealing: str = "linear",
        caching: FeatureCaching | None = None,
    ) -> None:
        if iterations is not None and (not is_integer(iterations) or iterations < 1):
            raise InputError("iterations", iterations, "a positive integer")
        if order not in ORDERS:
            raise InputError("order", order, did_you_mean(order, ORDERS))
        self.iterations, self.order = iterations, order
        self.annealing = None if last_steps is None else StepAnnealing(last_steps, annealing)
        self.caching = caching
        published = iterations is None and order == "random" and last_steps is None and caching is None
        self.exactness = "exact" if published else "approximate"
        self.keeps = TOGETHER

    def check(self, target: Target[Any]) -> None:
        if target.grid is None or not target.any_order:
            raise InputError("accelerator", "masked", "a masked autoregressive model of images (MAR)")
        if self.caching is not None:
            self.caching.check(target.config)

    def admit(self, requests: Sequence[Request], sampler: Any, stopping: Stopping) -> None:
        lengths = {request.grid.length for request in requests if request.grid is not None}
        if len(lengths) != 1:
            raise InputError("requests", sorted(lengths), "images of one size")
        if self.iterations is not None and self.iterations > min(lengths):
            raise InputError("iterations", self.iterations, f"1 to {min(lengths)}, the cells of the image")


class CellOrderSession(DraftSession):
    """Order of a batch of images.

    Attributes:
        order: [B, N] the cells in the order in which they are decided.
        counts: cells of each forward.
    """

    def __init__(
        self,
        drafter: CellOrder,
        grids: Sequence[ImageGrid],
        device: torch.device,
        random: RandomStream,
    ) -> None:
        grid, rows = grids[0], len(grids)
        self.cells, self.annealing, self.caching = grid.cells, drafter.annealing, drafter.caching
        place = torch.arange(grid.cells, device=device).expand(rows, -1)
        rank = random.uniform(place, Purpose.ORDER, 1, torch.float64)[..., 0]
        if drafter.order == "checkerboard":
            rank = rank + checkerboard_first(grid, device)
        self.order = rank.argsort(-1)
        self.counts = cells_by_forward(grid.cells, drafter.iterations or min(64, grid.cells))
        self.done = self.forwards = 0

    def open(self, canvas: Canvas) -> Draft:
        """Make room for the image; return a draft of no cell: a prompt alone predicts none."""
        canvas.reserve(2 * self.cells)
        return self._cells(self.order[:, :0], canvas)

    def propose(self, canvas: Canvas) -> Draft:
        iteration = min(self.forwards, len(self.counts) - 1)
        before, after = self.done, self.done + self.counts[iteration]
        self.done, self.forwards = after, self.forwards + 1
        progress = Progress(iteration, len(self.counts), before, after, self.annealing, self.caching)
        return self._cells(self.order[:, before:after], canvas, progress)

    def _cells(self, cells: Tensor, canvas: Canvas, progress: Progress | None = None) -> Cells:
        """Each cell [B, k] alone in a chain that predicts it."""
        rows, count = cells.shape
        tokens = canvas.tokens[:, :1].expand(rows, count, -1).flatten(0, 1)[:, None]
        ones = torch.ones(rows * count, 1, dtype=torch.bool, device=cells.device)
        return Cells.of(
            Draft.chain(torch.zeros_like(tokens), DraftKind.POINT),
            slots=cells.reshape(-1, 1),
            depths=torch.arange(self.cells, device=cells.device).expand(rows, -1),
            starts=cells.reshape(-1),
            visible=ones.new_ones(rows, 1, self.cells),
            follows=ones,
            completes=self.cells,
            progress=progress,
        )


def cells_by_forward(cells: int, iterations: int) -> list[int]:
    """Cells that are decided by each forward: the cosine schedule of MAR, with at least one in each.

    After iteration s, floor(N cos(pi / 2 (s + 1) / n)) cells are left, clipped so that every iteration
    decides one and leaves one to the next (2406.11838, section 4; as its code does).
    """
    left, counts = cells, []
    for iteration in range(iterations - 1):
        after = math.floor(cells * math.cos(math.pi / 2 * (iteration + 1) / iterations))
        after = max(1, min(left - 1, after))
        counts.append(left - after)
        left = after
    return [*(count for count in counts if count > 0), left]


def checkerboard_first(grid: ImageGrid, device: torch.device) -> Tensor:
    """[N] 0 for the cells of the colour that comes first, 1 for the others."""
    place = torch.arange(grid.cells, device=device)
    return (place // grid.columns + place % grid.columns) % 2
