"""Decoding order of MAR: cells of each forward, and the schedules that follow them."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from mmspec.families.mar.target import CellBlock, MARSampler
from mmspec.families.parallel_images.orders import cells_by_forward
from mmspec.vectors.denoising_head import StepAnnealing


@pytest.mark.parametrize("cells", [1, 5, 16, 256])
def test_every_number_of_forwards_decides_every_cell_once(cells: int) -> None:
    for iterations in range(1, cells + 1):
        counts = cells_by_forward(cells, iterations)
        assert len(counts) == iterations and sum(counts) == cells and min(counts) >= 1
        for step in range(1, iterations):
            left = cells - sum(counts[:step])
            wanted = math.floor(cells * math.cos(math.pi * step / (2 * iterations)))
            assert left <= max(wanted, 1), "never more than the cosine leaves"


@pytest.mark.parametrize(
    ("shape", "expected"),
    [
        ("linear", [50, 38, 27, 16, 5]),
        ("cosine", [50, 43, 27, 11, 5]),
        ("two-stage", [50, 50, 5, 5, 5]),
    ],
)
def test_steps_fall_from_the_first_forward_to_the_last(shape: str, expected: list[int]) -> None:
    annealing = StepAnnealing(5, shape)
    assert [annealing.steps(50, index, 5) for index in range(5)] == expected
    for iterations in range(1, 70):
        steps = [annealing.steps(50, index, iterations) for index in range(iterations)]
        assert steps == sorted(steps, reverse=True) and steps[0] == 50
        assert iterations == 1 or steps[-1] == 5
    assert StepAnnealing(5).steps(3, 0, 9) == 3, "never more than the head has"


def scale_at(schedule: str, known: int, left: int) -> float:
    """Return the guidance scale of a round that leaves so many of 256 cells, with `known` decided before."""
    sampler: Any = MARSampler(
        source=None,  # type: ignore[arg-type]
        schedule=None,
        guidance_scale=4.0,
        guidance_schedule=schedule,
        length=256,
    )
    cell, yes = torch.zeros(1, 1, dtype=torch.long), torch.ones(1, 1, dtype=torch.bool)
    progress = {"iteration": 0, "iterations": 1, "before": known, "after": 256 - left}
    draft = CellBlock.single(cell, cell, yes, cell, yes[:, None], completes=1, **progress)
    return float(sampler(torch.zeros(2, 1, 3), draft, [], torch.zeros(1)).scale)


def test_guidance_follows_what_is_decided() -> None:
    assert scale_at("rising", 0, 128) == 2.5
    assert scale_at("rising", 0, 255) == pytest.approx(1 + 3 / 256)
    assert scale_at("rising", 200, 0) == scale_at("rising", 200, 1) == pytest.approx(1 + 3 * 255 / 256)
    assert scale_at("constant", 100, 77) == 4.0
    assert scale_at("falling", 0, 200) == 4.0 and scale_at("falling", 128, 0) == 2.5
