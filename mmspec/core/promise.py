"""Promises: how close an output distribution is to the reference distribution."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Level", "Promise"]


class Level(StrEnum):
    """Closeness of the output distribution to the reference distribution."""

    EXACT = "exact"
    """The output distribution equals the reference distribution."""
    BOUNDED = "bounded"
    """The total variation distance between the two is bounded per token."""
    APPROXIMATE = "approximate"
    """The two are close by construction: they differ by a parameter without a bound in total variation."""
    LOSSY = "lossy"
    """No bound is known."""


@dataclass(frozen=True)
class Promise:
    """Closeness of a decoder's output distribution to the reference distribution.

    Attributes:
        level: kind of promise.
        bound: total variation per token, for BOUNDED promises.
        relative_to: the reference distribution in words, for models with more than one; "" for next-token
            prediction.
    """

    level: Level = Level.EXACT
    bound: float = 0.0
    relative_to: str = ""

    @property
    def is_exact(self) -> bool:
        return self.level is Level.EXACT

    def __str__(self) -> str:
        """Write "exact", "tv<=x", "approximate" or "lossy"."""
        return f"tv<={self.bound:g}" if self.level is Level.BOUNDED else str(self.level)
