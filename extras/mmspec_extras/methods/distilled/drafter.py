"""Images in a few forward passes of a student that maps noise to tokens (Distilled Decoding, 2412.17153)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Self

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas
from mmspec.core.image_grid import Layout
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
from mmspec.validation import is_integer
from mmspec_extras.families.distilled.target import DistilledTarget, NoisyCells

__all__ = ["DistilledDrafter", "Jumps", "first_cells"]

EXPONENT = 1.678  # two forward passes part at 80 of 256 cells, as published


def first_cells(rows: int, columns: int, forwards: int) -> list[int]:
    """Return the first cell of each forward pass, the begin of a row; later ones have more cells."""
    shares = [(index / forwards) ** EXPONENT for index in range(forwards)]
    begins = [max(index, round(rows * share)) for index, share in enumerate(shares)]
    return [columns * begin for begin in begins]


@dataclass(frozen=True)
class Jumps(DecodingOrder):
    """Raster order in `generation_steps` groups of whole rows."""

    def counts(self, layout: Layout) -> list[int]:
        """Return the number of cells of each group."""
        grid = layout.image
        begins = first_cells(grid.rows, grid.columns, int(self.generation_steps or 1))
        return [end - begin for begin, end in pairwise([*begins, grid.cells])]


class NoiseSession(OrderedCellsSession):
    """Images whose cells read noise, which depends on the seed, the row and the cell."""

    drafter: DistilledDrafter

    def __init__(self, drafter: DistilledDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
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
        forwards: forward passes of an image, from 1 to its rows; those of the model's config if None.

    Raises:
        InputError: `forwards` is not a positive integer, or exceeds the rows of the image.
    """

    name = "distilled"
    session: Callable[..., Any] = NoiseSession
    student: Any

    def __init__(self, forwards: int | None = None) -> None:
        super().__init__()
        if forwards is not None and (not is_integer(forwards) or forwards < 1):
            raise InputError("forwards", forwards, "must be a positive integer, or None")
        self.forwards, self.exactness = forwards, Level.LOSSY

    def fit(self, target: Target[Any]) -> Self:
        if not isinstance(target, DistilledTarget):
            raise InputError("accelerator", self.name, "needs a student of Distilled Decoding")
        forwards = self.forwards or target.config.forwards
        if forwards > target.grid.rows:
            raise InputError(
                "forwards", forwards, f"must be at most {target.grid.rows}, the rows of the image"
            )
        fitted = self.fitted(target)
        fitted.order, fitted.student = Jumps("raster", forwards), target.model.model
        fitted.exactness = Level.LOSSY
        return fitted
