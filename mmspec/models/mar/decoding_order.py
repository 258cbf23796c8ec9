"""Decoding schedule of MAR: tokens left after each iteration, and its guidance (2406.11838)."""

from __future__ import annotations

import math
from typing import Literal

from mmspec.errors import InputError

__all__ = ["guidance_at", "remaining"]


def remaining(iterations: int, cells: int = 256) -> list[int]:
    """Count the tokens still unknown after each iteration: a cosine, and at least one new token in each.

    With as many iterations as cells each gives one token. Published places are a random permutation, whose
    first `n` are those that remain.

    Raises:
        InputError: there are fewer cells than iterations, or no iterations.
    """
    if not 1 <= iterations <= cells:
        raise InputError("iterations", iterations, f"from 1 to the {cells} tokens of an image")
    left, counts = cells, []
    for step in range(1, iterations):
        wanted = math.floor(cells * math.cos(math.pi / 2 * step / iterations))
        left = max(1, min(left - 1, wanted))
        counts.append(left)
    return [*counts, 0]


def guidance_at(
    scale: float, left: int, cells: int = 256, schedule: Literal["linear", "constant"] = "linear"
) -> float:
    """Scale of the guidance in the iteration after which `left` of the tokens remain.

    "linear" grows with the share of tokens that are known then, and never reaches `scale`: the last iteration
    counts as if one token remained, as published.

    Raises:
        InputError: an unknown schedule.
    """
    if schedule == "constant":
        return scale
    if schedule != "linear":
        raise InputError("schedule", schedule, "'linear' or 'constant'")
    return 1 + (scale - 1) * (cells - max(left, 1)) / cells
