"""Steps of a denoising head that become fewer as an image grows."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.validation import is_integer

__all__ = ["StepAnnealing"]

SHAPES = ("linear", "cosine", "two-stage")
ROUNDING = 1e-9  # 45 * (1 - 1 / 3) is 30, and not a little less


@dataclass(frozen=True)
class StepAnnealing:
    """Steps of a denoising head that become fewer as an image grows (DiSA, 2505.20297).

    What is known of the image narrows the distribution of a token, so that fewer steps draw from it.

    Attributes:
        last: steps of the last forward; those of the first are the head's own.
        shape: "linear", "cosine" (long at both ends), or "two-stage" (`last` from the middle on).

    Raises:
        InputError: less than 2 steps, or an unknown shape.
    """

    last: int
    shape: str = "linear"

    def __post_init__(self) -> None:
        if not is_integer(self.last) or self.last < 2:
            raise InputError("last_steps", self.last, "an integer of at least 2")
        if self.shape not in SHAPES:
            raise InputError("annealing", self.shape, did_you_mean(self.shape, SHAPES))

    def steps(self, first: int, iteration: int, iterations: int) -> int:
        """Steps of the forward number `iteration`, from 0, of `iterations`; never more than the `first`."""
        passed = iteration / max(1, iterations - 1)
        left = 1 - passed
        if self.shape == "cosine":
            left = (1 + math.cos(math.pi * passed)) / 2
        elif self.shape == "two-stage":
            left = float(passed < 0.5)
        last = min(self.last, first)
        return last + math.floor((first - last) * left + ROUNDING)
