"""Images in a few forward passes of a student that maps noise to tokens (Distilled Decoding, 2412.17153)."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.interfaces import Target
from mmspec.core.promise import Level
from mmspec.core.random_stream import Purpose
from mmspec.core.session import PromptBatch
from mmspec.errors import InputError
from mmspec.families.parallel_images.cells import OrderedCellsDrafter, OrderedCellsSession
from mmspec.families.parallel_images.orders import DecodingOrder
from mmspec.families.parallel_images.target import CellGroup
from mmspec.places.order import Groups
from mmspec.targets.causal import CausalState
from mmspec_extras.families.distilled.target import DistilledTarget, NoisyCells

__all__ = ["DistilledDrafter", "first_cells"]

EXPONENT = 1.678  # two forward passes part at 80 of 256 cells, as published


def first_cells(rows: int, columns: int, steps: int) -> list[int]:
    """Return the first cell of each forward pass, which begins a row; later ones have more cells."""
    shares = [(index / steps) ** EXPONENT for index in range(steps)]
    begins = [max(index, round(rows * share)) for index, share in enumerate(shares)]
    return [columns * begin for begin in begins]


class NoiseSession(OrderedCellsSession):
    """Images whose cells read noise, which depends on the seed, the row and the cell."""

    drafter: DistilledDrafter

    def __init__(self, drafter: DistilledDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        begins = first_cells(self.layout.image.rows, self.layout.image.columns, drafter.steps)
        self.ends = [[*begins[1:], self.layout.cells]] * len(batch.requests)
        self.counts = [end - begin for begin, end in pairwise([0, *self.ends[0]])]
        width = drafter.student.config.noise_channels
        self.noise = batch.random.normal(self.order, Purpose.DRAFT, width, torch.float32)
        self.first = 0

    def attach(self, state: CausalState) -> None:
        self.first = self.first or len(state.queries)
        queries = self.drafter.student.embed_noise(self.noise).flatten(0, 1)
        state.queries = torch.cat([state.queries[: self.first], queries])

    def block(self, canvas: Canvas, places: Tensor, exists: Tensor, groups: Groups) -> CellGroup:
        group = super().block(canvas, places, exists, groups)
        (rows, cells), first = self.order.shape, self.layout.codebook_size + self.first
        row = torch.arange(rows, device=places.device)[:, None]
        return NoisyCells(**vars(group), noise=first + row * cells + places)


class DistilledDrafter(OrderedCellsDrafter):
    """Draws an image in a few forward passes, given the noise of its cells (2412.17153).

    Args:
        generation_steps: forward passes per image, from 1 to its rows; those of the model's config if None.

    Raises:
        InputError: `generation_steps` is not a positive integer, or exceeds the rows of the image.
    """

    name = "distilled"
    session: Callable[..., Any] = NoiseSession
    student: Any
    steps: int

    def __init__(self, generation_steps: int | None = None) -> None:
        super().__init__(generation_steps=generation_steps)
        self.exactness = Level.LOSSY

    def fit(self, target: Target[Any]) -> Self:
        if not isinstance(target, DistilledTarget):
            raise InputError("accelerator", self.name, "needs a student of Distilled Decoding")
        fitted, rows = self.fitted(target), target.grid.rows
        fitted.order, fitted.exactness = DecodingOrder("raster"), Level.LOSSY
        fitted.student = target.model.model
        fitted.steps = self.options.get("generation_steps", target.config.generation_steps)
        if fitted.steps > rows:
            raise InputError(
                "generation_steps", fitted.steps, f"must be at most {rows}, the rows of the image"
            )
        return fitted
