"""Step annealing: fewer steps of a denoising head as an image grows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmspec.errors import InputError
from mmspec.registry import require_known
from mmspec.validation import is_integer

__all__ = ["StepAnnealing"]

SHAPES = ("linear", "cosine", "two-stage")
ROUNDING = 1e-9  # makes 45 * (1 - 1 / 3) 30, and not slightly less


@dataclass(frozen=True)
class StepAnnealing:
    """Step annealing: fewer steps of a denoising head as an image grows (DiSA, 2505.20297).

    The decided part of the image narrows the distribution of a token, so that fewer steps suffice.

    Attributes:
        last: number of steps in the last forward pass; the first pass uses the head's own number.
        shape: "linear", "cosine" (slow at both ends), or "two-stage" (`last` from the middle on).

    Raises:
        InputError: fewer than 2 steps, or an unknown shape.
    """

    last: int
    shape: str = "linear"

    def __post_init__(self) -> None:
        if not is_integer(self.last) or self.last < 2:
            raise InputError("last_steps", self.last, "must be an integer of at least 2")
        require_known("annealing", self.shape, SHAPES)

    def steps(self, first: int, iteration: int, iterations: int) -> int:
        """Number of steps of forward pass `iteration`, from 0, of `iterations`; never more than `first`."""
        passed = iteration / max(1, iterations - 1)
        left = 1 - passed
        if self.shape == "cosine":
            left = (1 + math.cos(math.pi * passed)) / 2
        elif self.shape == "two-stage":
            left = float(passed < 0.5)
        last = min(self.last, first)
        return last + math.floor((first - last) * left + ROUNDING)
