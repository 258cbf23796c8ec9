"""Promises: how near an output distribution is to the reference distribution."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

__all__ = ["Level", "Promise"]


class Level(StrEnum):
    """Level of a promise."""

    EXACT = "exact"
    """The output distribution is the reference distribution."""
    BOUNDED = "bounded"
    """The total variation between the two, per token, has a bound."""
    APPROXIMATE = "approximate"
    """It differs from the reference distribution by a parameter that has no bound in total variation."""
    LOSSY = "lossy"
    """No bound is known."""


@dataclass(frozen=True)
class Promise:
    """Promise of a decoder about its output distribution.

    Attributes:
        level: how near it is to the reference distribution.
        bound: total variation per token, of BOUNDED promises.
        relative_to: the reference distribution in words, where models of the kind have more than one; "" for
            the next token's.
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
