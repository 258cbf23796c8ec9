"""The layout of an image as a sequence of tokens: cells in raster order, with the syntax between them.

Knows nothing of models. Tokens are codebook indices; syntax tokens are numbered from the codebook's size on.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from mmspec.errors import InputError

FREE = -1


@dataclass(frozen=True)
class ImageGrid:
    """Which token of the output is which cell of the image, and which tokens the grammar forces.

    Attributes:
        rows, columns: cells of the image.
        codebook_size: K; a cell holds a code from 0 to K - 1.
        row_end: the syntax token after each row of cells, K or more; None if there is none.
        ending: the syntax tokens after the last cell (and its row end), K or more.

    Raises:
        InputError: no cells, or a syntax token that is a code.
    """

    rows: int
    columns: int
    codebook_size: int
    row_end: int | None = None
    ending: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "codebook_size"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "at least 1")
        for token in (*([] if self.row_end is None else [self.row_end]), *self.ending):
            if token < self.codebook_size:
                raise InputError("syntax token", token, f"{self.codebook_size} or more; below are codes")

    @property
    def stride(self) -> int:
        """Tokens from a cell to the one below it."""
        return self.columns + (self.row_end is not None)

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    @property
    def length(self) -> int:
        """Tokens of the whole output, syntax included."""
        return self.rows * self.stride + len(self.ending)

    @cached_property
    def forced(self) -> tuple[int, ...]:
        """For each output token: the syntax token that must stand there, or FREE."""
        row = [FREE] * self.columns + ([] if self.row_end is None else [self.row_end])
        return (*row * self.rows, *self.ending)

    def codes(self, output: Sequence[int]) -> list[int]:
        """The codes in an output, whole or cut short, in raster order and without the syntax."""
        return [token for token, forced in zip(output, self.forced, strict=False) if forced == FREE]
