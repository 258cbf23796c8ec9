"""Staircase order of ZipAR: a row of cells begins when the row above is a window ahead."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.decoding.interfaces import Target
from mmspec.decoding.parallel import DecodingOrder
from mmspec.errors import InputError
from mmspec.validation import is_integer

__all__ = ["Staircase"]


@dataclass(frozen=True)
class Staircase(DecodingOrder):
    """Staircase: cell (i, j) is decoded once (i - 1, j ... j + s - 1) are (ZipAR, 2412.04062).

    Takes C + (R - 1) s forwards for R x C cells; the window C is raster order, and its output that of plain
    decoding. Lossy otherwise, without a bound: cells miss the right end of the row above.

    Args:
        zipar_window: s, from 1 to the columns of the image; None is a third of them, as published (8 of
            LlamaGen's 24, 16 of Lumina-mGPT's 48).
        adaptive: predict the first token of a row twice, one forward apart, and let an acceptance rule judge
            the token drawn the first time by the second distribution (the paper's adaptive window, judging
            once). The token then has the second distribution; a row that fails is one forward late.
            Takes s of 2 or more.

    Raises:
        InputError: a window outside that range.
    """

    zipar_window: int | None = None
    adaptive: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.adaptive, bool):
            raise InputError("adaptive", self.adaptive, "True or False")
        window = self.zipar_window
        if window is not None and (not is_integer(window) or window < 1 + self.adaptive):
            allowed = "an integer of 2 or more" if self.adaptive else "a positive integer"
            raise InputError("zipar_window", window, allowed)

    def window(self, columns: int) -> int:
        if self.zipar_window is None:
            return max(columns // 3, 1 + self.adaptive)
        return self.zipar_window

    def open_rows(self, decoded: Sequence[int], columns: int) -> list[int]:
        above, window = [columns, *decoded], self.window(columns)
        return [
            row
            for row, count in enumerate(decoded)
            if count < columns and above[row] >= min(count + window, columns)
        ]

    def puts_on_trial(self, row: int, decoded: Sequence[int], columns: int) -> bool:
        return self.adaptive and decoded[row - 1] < columns

    def fit(self, target: Target[Any]) -> Staircase:
        grid = getattr(target, "grid", None)
        if grid is None:
            raise InputError("accelerator", "zipar", "a model of image tokens: cells of an image have rows")
        if self.window(grid.columns) > grid.columns:
            allowed = f"1 to {grid.columns}, the columns of the image"
            raise InputError("zipar_window", self.zipar_window, allowed)
        return self
