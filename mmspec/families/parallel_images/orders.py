"""Decoding orders of the cells of an image, as data: which cells are decided together, and in what order.

Pure functions of a grid and of random ranks; models and drafts are not known here.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from mmspec.core.image_grid import GridSequence, ImageGrid, Layout, require_grid
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.errors import InputError
from mmspec.families.parallel_images.group_sizes import published_sizes
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer, require_number

__all__ = [
    "ORDERS",
    "DecodingOrder",
    "cells_by_forward",
    "checkerboard_first",
    "diagonal_order",
    "group_sizes",
    "proximity_order",
    "region_order",
]

ORDERS = ("proximity", "raster", "random", "diagonal", "regions", "blocks", "checkerboard", "scales")
#: Orders that say themselves how many forwards an image takes.
OWN_STEPS = ("diagonal", "regions", "blocks", "scales")
#: Of published models, by the number of cells (LPD, 2507.01957).
PUBLISHED_STEPS = {256: 20, 1024: 48}


@dataclass(frozen=True)
class DecodingOrder:
    """Decoding order of the cells of images: groups of cells, one group a forward.

    Args:
        order: "proximity", cells near those that are decided, far from each other (LPD, 2507.01957, section
            3.3); "raster", "random", or "checkerboard", one colour of a chessboard first (GtR, 2510.17171);
            "diagonal", the cells of one anti-diagonal together (NAR, 2503.10696); "regions", the same cell of
            every region together, of the first cells one after another (PAR, 2412.15119); "blocks", block
            after block of the raster, the first one cell after cell (NBP, 2502.07737); "scales",
            the cells of one grid of several together (VAR, 2404.02905).
        generation_steps: forwards of an image; None is the published number of its size, or of about 5 / 4 of
            its rows, and one cell a forward for "raster". Given by the order itself for "diagonal",
            "regions", "blocks" and "scales".
        repulsion_threshold, proximity_threshold: of "proximity"; see `proximity_order`.
        regions: of "regions".
        block_size: cells of one of "blocks"; None is a row.

    Raises:
        InputError: no such order, or a value outside its range.
    """

    order: str = "proximity"
    generation_steps: int | None = None
    repulsion_threshold: int = 2
    proximity_threshold: float = 1.0
    regions: int = 4
    block_size: int | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise InputError("order", self.order, did_you_mean(self.order, ORDERS))
        steps = self.generation_steps
        if steps is not None and (not is_integer(steps) or steps < 1):
            raise InputError("generation_steps", steps, "a positive integer, or None")
        if steps is not None and self.order in OWN_STEPS:
            raise InputError("generation_steps", steps, f"None: the order {self.order!r} says it")
        if not is_integer(self.repulsion_threshold) or self.repulsion_threshold < 0:
            raise InputError("repulsion_threshold", self.repulsion_threshold, "an integer of 0 or more")
        require_number("proximity_threshold", self.proximity_threshold, 0.0, 7.0, "0 to 7")
        if not is_integer(self.regions) or self.regions < 1 or math.isqrt(self.regions) ** 2 != self.regions:
            raise InputError("regions", self.regions, "the square of an integer")
        if self.block_size is not None and (not is_integer(self.block_size) or self.block_size < 1):
            raise InputError("block_size", self.block_size, "a positive integer, or None")

    def counts(self, layout: Layout) -> list[int]:
        """Cells of each group of an image.

        Raises:
            InputError: more forwards than the image has cells, regions or blocks that do not divide it, or an
                order of one grid where there are several.
        """
        if self.order == "scales":
            if not isinstance(layout, GridSequence):
                raise InputError("order", self.order, "an order of one grid: this model draws in one scale")
            return [grid.cells for grid in layout.grids]
        grid = require_grid(layout, f"the order {self.order!r}")
        rows, columns, cells = grid.rows, grid.columns, grid.cells
        if self.order == "diagonal":
            return [len(group) for group in diagonal_order(rows, columns)]
        if self.order == "regions":
            side = math.isqrt(self.regions)
            if rows % side or columns % side:
                raise InputError("regions", self.regions, f"the square of a divisor of {rows} and {columns}")
            return [1] * self.regions + [self.regions] * (cells // self.regions - 1)
        if self.order == "blocks":
            size = self.block_size or columns
            if grid.frame.cells % size:
                raise InputError("block_size", size, f"a divisor of {grid.frame.cells}")
            return [1] * size + [size] * (cells // size - 1)
        steps = self.generation_steps
        if steps is not None and steps > cells:
            raise InputError("generation_steps", steps, f"1 to {cells}, the cells of the image")
        if steps is None:
            default = cells if self.order == "raster" else max(1, 5 * rows // 4)
            steps = PUBLISHED_STEPS.get(cells, default) if self.order != "raster" else default
        return group_sizes(cells, steps)

    def draw(self, layout: Layout, random: RandomStream) -> Tensor:
        """[B, N] cells of the images of a batch, each in the order in which it is decided."""
        images, device = len(random.keys), random.keys.device
        place = torch.arange(layout.cells, device=device).expand(images, -1)
        if self.order in ("raster", "blocks", "scales"):
            return place
        grid = require_grid(layout, f"the order {self.order!r}")
        rows, columns = grid.rows, grid.columns
        if self.order in ("diagonal", "regions"):
            if self.order == "regions":
                fixed = region_order(rows, columns, self.regions)
            else:
                fixed = [cell for group in diagonal_order(rows, columns) for cell in group]
            return torch.tensor(fixed, device=device).expand(images, -1)
        if self.order != "proximity":
            rank = random.uniform(place, Purpose.ORDER, 1, torch.float64)[..., 0]
            first = checkerboard_first(grid, device) if self.order == "checkerboard" else 0
            return (rank + first).argsort(-1)
        sizes = self.counts(grid)
        ranks = random.uniform(place, Purpose.ORDER, len(sizes), torch.float64).cpu().numpy()
        thresholds = self.repulsion_threshold, self.proximity_threshold
        drawn = [proximity_order(rows, columns, sizes, image.T, *thresholds) for image in ranks]
        return torch.tensor(drawn, device=device)


def group_sizes(cells: int, steps: int) -> list[int]:
    """Cells of each of so many forwards: the increments of a cosine, rounded to add up; the first is 1.

    The published sizes of LPD (2507.01957) for 256 and 1024 cells are these, or differ by a cell or two and
    are taken as they were published.
    """
    if (published := published_sizes(cells, steps)) is not None:
        return published
    angle = math.pi / 2 / steps
    shares = [cells * (math.cos(angle * step) - math.cos(angle * (step + 1))) for step in range(steps)]
    sizes = [1 if step == 0 else max(1, math.floor(share)) for step, share in enumerate(shares)]
    rounds = 0 if steps > 1 else cells - 1  # of an image in one forward
    sizes[0] += rounds
    missing = cells - sum(sizes)
    by_rest = sorted(range(1, steps), key=lambda step: sizes[step] - shares[step])
    for step in (by_rest * (1 + abs(missing)))[: max(missing, 0)]:
        sizes[step] += 1
    while missing < 0:  # least shares were rounded up to a cell
        sizes[max(range(steps), key=sizes.__getitem__)] -= 1
        missing += 1
    return sizes


def diagonal_order(rows: int, columns: int) -> list[list[int]]:
    """Cells of each anti-diagonal, from the top: group d has the cells (i, j) with i + j = d."""
    return [
        [row * columns + group - row for row in range(rows) if 0 <= group - row < columns]
        for group in range(rows + columns - 1)
    ]


def region_order(rows: int, columns: int, regions: int) -> list[int]:
    """Cells of an image of M x M regions: the first cell of each region, then the second of each, and so on.

    Regions come in raster order, and so do the cells inside each. Place k of the sequence holds the cell
    k // n of the region k % n, of n regions (PAR, 2412.15119, section 3.2).
    """
    side = math.isqrt(regions)
    height, width = rows // side, columns // side
    cell = np.arange(rows * columns).reshape(side, height, side, width)
    order: list[int] = cell.transpose(1, 3, 0, 2).reshape(-1).tolist()
    return order


@lru_cache(maxsize=8)
def _distances(rows: int, columns: int) -> tuple[NDArray[Any], ...]:
    """[N, N] distances of cells: as the crow flies; the larger one of rows and columns; and 1 for neighbours.

    Neighbours stand beside each other, in one matrix, or touch at a corner, in another.
    """
    row, column = np.divmod(np.arange(rows * columns), columns)
    down, across = abs(row[:, None] - row), abs(column[:, None] - column)
    beside, corner = down + across == 1, (down == 1) & (across == 1)
    larger = np.maximum(down, across)
    return np.hypot(down, across), larger, beside.astype(np.float32), corner.astype(np.float32)


def proximity_order(
    rows: int,
    columns: int,
    sizes: Sequence[int],
    ranks: NDArray[np.float64],
    repulsion_threshold: int = 2,
    proximity_threshold: float = 1.0,
) -> list[int]:
    """Cells near those that are decided, and far from those that are decided with them (LPD, 2507.01957).

    The proximity of a cell is the sum of 1 / distance over its decided neighbours, of eight. Cells of at
    least `proximity_threshold` join a group from the nearest on, equal ones at random, unless a cell of the
    group is no more than `repulsion_threshold` rows and columns away. If these are too few, those follow that
    are farthest from the group.

    Args:
        rows, columns: of the image.
        sizes: cells of each group.
        ranks: [groups, N] random numbers, by which equal cells are ordered in each group.
    """
    distance, larger, straight, slanted = _distances(rows, columns)
    is_open, order = np.ones(rows * columns, dtype=bool), list[int]()
    for size, rank in zip(sizes, ranks, strict=True):
        decided = (~is_open).astype(np.float32)
        # of whole numbers, so that equal cells are equal
        proximity = straight @ decided + (slanted @ decided) / math.sqrt(2)
        listed = np.lexsort((rank, -proximity))
        listed = listed[is_open[listed]]
        is_near, is_apart = proximity[listed] >= proximity_threshold, np.ones_like(is_open)
        group, rest = list[int](), listed[~is_near].tolist()
        for cell in listed[is_near].tolist():
            if len(group) < size and is_apart[cell]:
                group.append(cell)
                is_apart &= larger[cell] > repulsion_threshold
            else:
                rest.append(cell)
        group += _farthest(distance, group, rest, size - len(group), rank)
        is_open[group] = False
        order += group
    return order


def _farthest(
    distance: NDArray[np.float64], group: list[int], cells: list[int], count: int, rank: NDArray[np.float64]
) -> list[int]:
    """Choose `count` of some cells one after another, each the farthest from the group and those before."""
    chosen = list[int]()
    if count and not group:
        chosen.append(min(cells, key=lambda cell: rank[cell]))
    nearest = distance[np.ix_(cells, group + chosen)].min(1) if count else np.zeros(0)
    while len(chosen) < count:
        chosen.append(cells[int(nearest.argmax())])
        nearest = np.minimum(nearest, distance[cells, chosen[-1]])
    return chosen


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
