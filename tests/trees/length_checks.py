"""Checks of drafts with changing sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import cycle
from typing import Any

from mmspec.trees.pacing import PacedDrafter, PacingPolicy, PruningPolicy, SizePolicy

PACE = (0, 0, 1, 0, 2, 0, 0, 3, 1, 0, 4, 4)


class Script(SizePolicy):
    """Chooses by a list, again and again, whatever rounds cost."""

    def __init__(self, depths: Sequence[int], pace: Iterable[int] = PACE) -> None:
        super().__init__(depths)
        self.pace = cycle(choice for choice in pace if choice <= len(depths))
        self.rounds: list[tuple[int, list[int], float]] = []

    def choose(self) -> int:
        return next(self.pace)

    def record(self, choice: int, tokens: Sequence[int], seconds: float) -> None:
        self.rounds.append((choice, list(tokens), seconds))


class PruningScript(PruningPolicy):
    """Rests, or keeps so many candidates, by a list."""

    def __init__(self, nodes: Sequence[int], pace: Iterable[int] = PACE) -> None:
        super().__init__(nodes)
        self.pace = cycle(choice for choice in pace if choice <= len(nodes))
        self.next = 0

    def rests(self) -> bool:
        self.next = next(self.pace)
        return self.next == 0

    def choose(self, sums: Sequence[Sequence[float]]) -> int:
        return self.next


class Scripts(dict[int, PacingPolicy]):
    """A script for every batch size."""

    def __init__(self, pace: Iterable[int]) -> None:
        super().__init__()
        self.pace = tuple(pace)

    def setdefault(self, rows: int, default: PacingPolicy) -> PacingPolicy:  # type: ignore[override]
        if isinstance(default, PruningPolicy):
            return super().setdefault(rows, PruningScript(default.nodes[1:], self.pace))
        return super().setdefault(rows, Script(default.depths[1:], self.pace))


def paced(inner: Any, pace: Iterable[int] = PACE) -> PacedDrafter:
    """A drafter that runs through its sizes, plain rounds between them."""
    return PacedDrafter(inner, Scripts(pace))
