"""Decoding orders of the cells of an image: which cells are decided together, and in what order.

They are pure functions of a grid and of random ranks, without models and drafts.
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
#: Orders that determine the number of forward passes per image.
OWN_STEPS = ("diagonal", "regions", "blocks", "scales")
#: Forward passes of published models, by the number of cells (LPD, 2507.01957).
PUBLISHED_STEPS = {256: 20, 1024: 48}


@dataclass(frozen=True)
class DecodingOrder:
    """Decoding order of the cells of images: groups of cells, one group per forward pass.

    Args:
        order: one of
            "proximity": cells near decided ones, but far from each other (LPD, 2507.01957, section 3.3);
            "raster" or "random";
            "checkerboard": one colour of a chessboard first (GtR, 2510.17171);
            "diagonal": the cells of an anti-diagonal together (NAR, 2503.10696);
            "regions": the same cell of every region together, except the first cells, which are decided one
            after another (PAR, 2412.15119);
            "blocks": block after block of the raster, the first one cell by cell (NBP, 2502.07737);
            "scales": the cells of each of several grids together (VAR, 2404.02905).
        generation_steps: forward passes per image, from 1 to its cells. The orders "diagonal", "regions",
            "blocks" and "scales" determine it; published number of its size, or else about 5 / 4 of its rows,
            and one per cell for "raster" if None.
        repulsion_threshold: for "proximity": rows and columns within which cells are not decided together, 0
            or more.
        proximity_threshold: for "proximity": cells whose sum of 1 / distance to decided neighbours is at
            least this, 0 to 7, are decided first.
        regions: number of regions of "regions", the square of an integer.
        block_size: cells per block of "blocks"; a row if None.

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
            raise InputError("generation_steps", steps, "must be a positive integer, or None")
        if steps is not None and self.order in OWN_STEPS:
            rule = f"must be None: the order {self.order!r} determines it"
            raise InputError("generation_steps", steps, rule)
        if not is_integer(self.repulsion_threshold) or self.repulsion_threshold < 0:
            rule = "must be an integer of at least 0"
            raise InputError("repulsion_threshold", self.repulsion_threshold, rule)
        require_number("proximity_threshold", self.proximity_threshold, 0.0, 7.0, "must be between 0 and 7")
        if not is_integer(self.regions) or self.regions < 1 or math.isqrt(self.regions) ** 2 != self.regions:
            raise InputError("regions", self.regions, "must be the square of an integer")
        if self.block_size is not None and (not is_integer(self.block_size) or self.block_size < 1):
            raise InputError("block_size", self.block_size, "must be a positive integer, or None")

    def counts(self, layout: Layout) -> list[int]:
        """Return the number of cells of each group of an image.

        Raises:
            InputError: more forward passes than the image has cells, regions or blocks that do not divide it,
                or an order for one grid with several.
        """
        if self.order == "scales":
            if not isinstance(layout, GridSequence):
                rule = "must be an order of one grid: this model draws in one scale"
                raise InputError("order", self.order, rule)
            return [grid.cells for grid in layout.grids]
        grid = require_grid(layout, f"the order {self.order!r}")
        rows, columns, cells = grid.rows, grid.columns, grid.cells
        if self.order == "diagonal":
            return [len(group) for group in diagonal_order(rows, columns)]
        if self.order == "regions":
            side = math.isqrt(self.regions)
            if rows % side or columns % side:
                rule = f"must be the square of a divisor of {rows} and {columns}"
                raise InputError("regions", self.regions, rule)
            return [1] * self.regions + [self.regions] * (cells // self.regions - 1)
        if self.order == "blocks":
            size = self.block_size or columns
            if grid.frame.cells % size:
                raise InputError("block_size", size, f"must be a divisor of {grid.frame.cells}")
            return [1] * size + [size] * (cells // size - 1)
        steps = self.generation_steps
        if steps is not None and steps > cells:
            rule = f"must be between 1 and {cells}, the cells of the image"
            raise InputError("generation_steps", steps, rule)
        if steps is None:
            default = cells if self.order == "raster" else max(1, 5 * rows // 4)
            steps = PUBLISHED_STEPS.get(cells, default) if self.order != "raster" else default
        return group_sizes(cells, steps)

    def draw(self, layout: Layout, random: RandomStream) -> Tensor:
        """Draw the cells [B, N] of the images of a batch, in the order in which they are decided."""
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
    """Return the cells of each forward pass: increments of a cosine, rounded to sum to all; the first is 1.

    For 256 and 1024 cells these are the published sizes of LPD (2507.01957). Published sizes that differ from
    the cosine by a cell or two are used as published.
    """
    if (published := published_sizes(cells, steps)) is not None:
        return published
    angle = math.pi / 2 / steps
    shares = [cells * (math.cos(angle * step) - math.cos(angle * (step + 1))) for step in range(steps)]
    sizes = [1 if step == 0 else max(1, math.floor(share)) for step, share in enumerate(shares)]
    rounds = 0 if steps > 1 else cells - 1  # for an image in one forward pass
    sizes[0] += rounds
    missing = cells - sum(sizes)
    by_rest = sorted(range(1, steps), key=lambda step: sizes[step] - shares[step])
    for step in (by_rest * (1 + abs(missing)))[: max(missing, 0)]:
        sizes[step] += 1
    while missing < 0:  # the smallest shares were rounded up to a cell
        sizes[max(range(steps), key=sizes.__getitem__)] -= 1
        missing += 1
    return sizes


def diagonal_order(rows: int, columns: int) -> list[list[int]]:
    """Return the cells of each anti-diagonal, from the top: group d has the cells (i, j) with i + j = d."""
    return [
        [row * columns + group - row for row in range(rows) if 0 <= group - row < columns]
        for group in range(rows + columns - 1)
    ]


def region_order(rows: int, columns: int, regions: int) -> list[int]:
    """Return the cells of an image of M x M regions: the first cell of each region, then each second one, ...

    Regions and the cells inside each are in raster order. Index k of the sequence is cell k // n of region
    k % n, for n regions (PAR, 2412.15119, section 3.2).
    """
    side = math.isqrt(regions)
    height, width = rows // side, columns // side
    cell = np.arange(rows * columns).reshape(side, height, side, width)
    order: list[int] = cell.transpose(1, 3, 0, 2).reshape(-1).tolist()
    return order


@lru_cache(maxsize=8)
def _distances(rows: int, columns: int) -> tuple[NDArray[Any], ...]:
    """Matrices [N, N] of cells: Euclidean distances, larger distances of rows and columns, and neighbours.

    Two matrices have 1 for neighbours: one for a common side, the other for a common corner.
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
    """Return cells in LPD's order: near decided ones, far from those decided with them (2507.01957).

    The proximity of a cell is the sum of 1 / distance over its decided neighbours, of eight. Cells of
    proximity `proximity_threshold` or more join a group in the order of proximity, and at random if equal,
    unless a cell of the group is within `repulsion_threshold` rows and columns. If there are too few of them,
    the cells farthest from the group follow.

    Args:
        rows, columns: size of the image.
        sizes: number of cells of each group.
        ranks: [groups, N] random numbers that order equal cells in each group.
        repulsion_threshold: rows and columns within which cells are not decided together.
        proximity_threshold: least proximity of cells that join a group first.
    """
    distance, larger, straight, slanted = _distances(rows, columns)
    is_open, order = np.ones(rows * columns, dtype=bool), list[int]()
    for size, rank in zip(sizes, ranks, strict=True):
        decided = (~is_open).astype(np.float32)
        # from whole numbers, so that equal proximities compare equal
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
    """Choose `count` of some cells one by one, each the farthest from the group and those chosen before."""
    chosen = list[int]()
    if count and not group:
        chosen.append(min(cells, key=lambda cell: rank[cell]))
    nearest = distance[np.ix_(cells, group + chosen)].min(1) if count else np.zeros(0)
    while len(chosen) < count:
        chosen.append(cells[int(nearest.argmax())])
        nearest = np.minimum(nearest, distance[cells, chosen[-1]])
    return chosen


def cells_by_forward(cells: int, iterations: int) -> list[int]:
    """Return the cells that each forward pass decides: the cosine schedule of MAR, with at least one in each.

    After iteration s, floor(N cos(pi / 2 (s + 1) / n)) cells are left, clipped so that every iteration
    decides at least one and leaves one to the next (2406.11838, section 4, and its code).
    """
    left, counts = cells, []
    for iteration in range(iterations - 1):
        after = math.floor(cells * math.cos(math.pi / 2 * (iteration + 1) / iterations))
        after = max(1, min(left - 1, after))
        counts.append(left - after)
        left = after
    return [*(count for count in counts if count > 0), left]


def checkerboard_first(grid: ImageGrid, device: torch.device) -> Tensor:
    """[N] 0 for the cells of the first colour, 1 for the others."""
    place = torch.arange(grid.cells, device=device)
    return (place // grid.columns + place % grid.columns) % 2
