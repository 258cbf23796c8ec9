"""Decoding orders of images: permutations, group sizes, and small orders written out."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.core.image_grid import ImageGrid
from mmspec.core.random_stream import RandomStream
from mmspec.errors import InputError
from mmspec.families.parallel_images.orders import (
    ORDERS,
    DecodingOrder,
    diagonal_order,
    group_sizes,
    proximity_order,
    region_order,
)

#: As their authors list them: orders/group_sizes_lookup.json of github.com/mit-han-lab/lpd.
PUBLISHED = {
    (256, 128): [1] * 41 + [2] * 46 + [3] * 41,
    (256, 32): [
        *[1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6, 7, 7, 8, 8, 9, 9, 10, 10, 10],
        *[11] * 4,
        *[12] * 8,
    ],
    (256, 24): [*range(1, 12), 11, 12, 13, 14, 14, 14, 15, 15, 16, 16, 16, 17, 17],
    (256, 20): [1, 2, 4, 5, 7, 8, 10, 11, 12, 14, 15, 16, 17, 18, 18, 19, 19, 20, 20, 20],
    (256, 16): [1, 4, 6, 8, 11, 13, 15, 17, 19, 20, 22, 23, 24, 24, 24, 25],
    (256, 8): [1, 15, 24, 32, 40, 45, 49, 50],
    (1024, 192): [
        *[1] * 22,
        *[2] * 15,
        *[3] * 16,
        *[4] * 16,
        *[5] * 19,
        *[6] * 21,
        *[7] * 27,
        *[8] * 55,
        10,
    ],
    (1024, 64): [
        *[1, 1, 2, 2, 3, 3, 4, 5, 5, 6, 6, 7, 8, 8, 9, 9, 10, 10, 11, 12, 12, 13, 13, 14, 14, 15, 15, 16, 16],
        *[17, 17, 18, 18, 18, 19, 19, 20, 20, 20, 21, 21, 21, 22, 22, 22, *[23] * 5, *[24] * 6, *[25] * 8],
    ],
    (1024, 48): [
        *range(1, 23),
        *[23, 23, 24, 25, 26, 26, 27, 28, 28, 29, 29, 30, 30, 31, 31],
        *[32] * 3,
        *[33] * 7,
        34,
    ],
}
#: Of every list in that file, the forwards.
FORWARDS = {
    256: (256, 128, 64, 32, 24, 20, 16, 12, 8),
    1024: (1024, 512, 256, 224, 192, 160, 128, 96, 80, 64, 56, 48, 40, 32),
}


@pytest.mark.parametrize(("cells", "steps"), PUBLISHED)
def test_sizes_of_groups_are_the_published_ones(cells: int, steps: int) -> None:
    assert group_sizes(cells, steps) == PUBLISHED[cells, steps]
    assert sum(PUBLISHED[cells, steps]) == cells


@pytest.mark.parametrize("cells", FORWARDS)
def test_published_groups_never_shrink_and_add_up(cells: int) -> None:
    for steps in FORWARDS[cells]:
        sizes = group_sizes(cells, steps)
        assert sizes == sorted(sizes) and len(sizes) == steps and sum(sizes) == cells


@given(st.integers(1, 7), st.integers(1, 7))
def test_diagonals_hold_every_cell_once(rows: int, columns: int) -> None:
    groups = diagonal_order(rows, columns)
    assert len(groups) == rows + columns - 1
    assert sorted(cell for group in groups for cell in group) == list(range(rows * columns))
    for index, group in enumerate(groups):
        assert all(cell // columns + cell % columns == index for cell in group)
        assert group == sorted(group)


@given(st.integers(1, 3), st.integers(1, 4), st.integers(1, 4))
def test_the_sequence_of_regions_leads_back_to_the_image(side: int, height: int, width: int) -> None:
    rows, columns, regions = side * height, side * width, side**2
    order = region_order(rows, columns, regions)
    image = np.arange(rows * columns)
    inverse = np.argsort(order)
    assert (image[order][inverse] == image).all()
    for place, cell in enumerate(order):
        row, column = divmod(cell, columns)
        assert row // height * side + column // width == place % regions
        assert row % height * width + column % width == place // regions


@settings(max_examples=30)
@given(st.integers(1, 6), st.integers(1, 6), st.integers(0, 3), st.data())
def test_an_order_by_proximity_keeps_its_promises(rows: int, columns: int, apart: int, data: Any) -> None:
    cells = rows * columns
    sizes = group_sizes(cells, data.draw(st.integers(1, cells)))
    ranks = np.random.default_rng(data.draw(st.integers(0, 99))).random((len(sizes), cells))
    order = proximity_order(rows, columns, sizes, ranks, apart)
    assert sorted(order) == list(range(cells))
    begin = 0
    for size in sizes:
        decided, group = order[:begin], order[begin : begin + size]
        begin += size
        near = [cell for cell in group if proximity(cell, decided, columns) >= 1]
        chosen_near = near[: longest_apart(near, columns, apart)]
        # those that are near come first, the nearest of all at their head, and are apart from each other
        assert group[: len(chosen_near)] == chosen_near or not near or group[0] in near
        if decided and near:
            nearest = max(proximity(cell, decided, columns) for cell in range(cells) if cell not in decided)
            assert math.isclose(proximity(group[0], decided, columns), nearest)


def proximity(cell: int, decided: list[int], columns: int) -> float:
    row, column = divmod(cell, columns)
    total = 0.0
    for other in decided:
        down, across = other // columns - row, other % columns - column
        if max(abs(down), abs(across)) == 1:
            total += 1 / math.hypot(down, across)
    return total


def longest_apart(cells: list[int], columns: int, apart: int) -> int:
    for count, cell in enumerate(cells):
        for other in cells[:count]:
            if max(abs(cell // columns - other // columns), abs(cell % columns - other % columns)) <= apart:
                return count
    return len(cells)


@pytest.mark.parametrize("order", [order for order in ORDERS if order != "scales"])
def test_orders_are_permutations_of_the_same_cells_in_any_batch(order: str) -> None:
    grid, decided = ImageGrid(4, 4, 8), DecodingOrder(order)
    drawn = decided.draw(grid, RandomStream.from_seed([5, 6, 7], 3))
    assert (drawn.sort(1).values == torch.arange(16)).all()
    assert sum(decided.counts(grid)) == 16
    assert (decided.draw(grid, RandomStream.from_seed([6], 1)) == drawn[1]).all()
    assert (drawn[0] != drawn[1]).any() == (order in ("proximity", "random", "checkerboard"))


def test_numbers_of_forwards_are_those_of_the_papers() -> None:
    image, large = ImageGrid(16, 16, 8), ImageGrid(32, 32, 8)
    assert [len(DecodingOrder().counts(grid)) for grid in (image, large)] == [20, 48]
    assert [len(DecodingOrder("diagonal").counts(grid)) for grid in (image, large)] == [31, 63]
    assert len(DecodingOrder("regions", regions=4).counts(image)) == 4 + 252 // 4 == 67
    assert len(DecodingOrder("regions", regions=16).counts(large)) == 16 + 1008 // 16
    assert len(DecodingOrder("raster").counts(image)) == 256
    clip = ImageGrid(5 * 16, 16, 8, frames=5)  # NBP on UCF-101
    assert len(DecodingOrder("blocks").counts(clip)) == 16 + (1280 - 16) // 16 == 95
    assert len(DecodingOrder("blocks", block_size=1).counts(clip)) == 1280
    with pytest.raises(InputError, match="block_size"):
        DecodingOrder("blocks", block_size=512).counts(clip)  # two frames


@pytest.mark.parametrize(
    "options",
    [
        {"order": "spiral"},
        {"generation_steps": 0},
        {"order": "diagonal", "generation_steps": 4},
        {"repulsion_threshold": -1},
        {"proximity_threshold": 9.0},
        {"regions": 5},
        {"block_size": 0},
    ],
)
def test_values_out_of_range_are_named(options: dict[str, Any]) -> None:
    with pytest.raises(InputError, match=list(options)[-1]):
        DecodingOrder(**options)
