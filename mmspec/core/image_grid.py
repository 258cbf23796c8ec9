"""Layout and grammar of images as a sequence of tokens: codes, and the syntax between.

Knows nothing of models. Tokens are codebook indices; syntax tokens are numbered from the codebook's size on.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain

import torch
from torch import Tensor

from mmspec.core.rows import RowField, Rows, named
from mmspec.errors import InputError

FREE = -1


class Layout(ABC):
    """Layout of an output: how long it is, and where the grammar forces a syntax token between the codes.

    Attributes:
        codebook_size: K; a place that is FREE holds a code from 0 to K - 1.
    """

    codebook_size: int

    @property
    @abstractmethod
    def forced(self) -> tuple[int, ...]:
        """[length] the syntax token, K or more, that must stand at each output index, or FREE."""

    @property
    @abstractmethod
    def image(self) -> ImageGrid:
        """Grid of the image that is drawn in the end."""

    @property
    def length(self) -> int:
        """Tokens of the whole output, syntax included."""
        return len(self.forced)

    @property
    def cells(self) -> int:
        """Codes of the whole output."""
        return self.forced.count(FREE)

    def codes(self, output: Sequence[int]) -> list[int]:
        """Codes of an output, whole or cut short, in its order and without the syntax."""
        return [token for token, forced in zip(output, self.forced, strict=False) if forced == FREE]

    def __str__(self) -> str:
        return f"{self.length} tokens"


@dataclass(frozen=True)
class ImageGrid(Layout):
    """Layout of an image: its cells in raster order, and the syntax tokens that the grammar forces.

    Attributes:
        rows, columns: cells of the image.
        codebook_size: K; a cell holds a code from 0 to K - 1.
        row_end: the syntax token after each row of cells, K or more; None if there is none.
        ending: the syntax tokens after the last cell (and its row end), K or more.
        last_row_end: the syntax token that stands for the last row's end; None for `row_end` there too.
        frames: of a clip, which stand one below another; 1 for an image.

    Raises:
        InputError: no cells, a syntax token that is a code, or frames that do not divide the rows.
    """

    rows: int
    columns: int
    codebook_size: int
    row_end: int | None = None
    ending: tuple[int, ...] = ()
    last_row_end: int | None = None
    frames: int = 1

    def __post_init__(self) -> None:
        for name in ("rows", "columns", "codebook_size", "frames"):
            if getattr(self, name) < 1:
                raise InputError(name, getattr(self, name), "at least 1")
        if self.rows % self.frames:
            raise InputError("frames", self.frames, f"a divisor of the {self.rows} rows")
        if self.row_end is None and self.last_row_end is not None:
            raise InputError("last_row_end", self.last_row_end, "None where rows have no end")
        for token in (self.row_end, self.last_row_end, *self.ending):
            if token is not None and token < self.codebook_size:
                raise InputError("syntax token", token, f"{self.codebook_size} or more; below are codes")

    @property
    def image(self) -> ImageGrid:
        return self

    @property
    def stride(self) -> int:
        """Tokens from a cell to the one below it."""
        return self.columns + (self.row_end is not None)

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    @property
    def frame(self) -> ImageGrid:
        """The grid of one frame."""
        return ImageGrid(self.rows // self.frames, self.columns, self.codebook_size, self.row_end)

    @property
    def length(self) -> int:  # of any size that is asked for, before it is refused
        return self.rows * self.stride + len(self.ending)

    @cached_property
    def forced(self) -> tuple[int, ...]:
        row = [FREE] * self.columns + ([] if self.row_end is None else [self.row_end])
        cells = row * self.rows
        if self.last_row_end is not None:
            cells[-1] = self.last_row_end
        return (*cells, *self.ending)

    def __str__(self) -> str:
        return f"{self.rows} rows of {self.columns} tokens"


@dataclass(frozen=True)
class GridSequence(Layout):
    """Layout of grids one after another: scales of an image, frames of a video, a preview and its image.

    Attributes:
        grids: of one codebook; what separates two of them is the ending of the first, and the last one is
            that of the image.

    Raises:
        InputError: no grid, or several codebook sizes.
    """

    grids: tuple[ImageGrid, ...]
    codebook_size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(sizes := {grid.codebook_size for grid in self.grids}) != 1:
            raise InputError("grids", sorted(sizes), "grids of one codebook size")
        object.__setattr__(self, "codebook_size", sizes.pop())

    @property
    def image(self) -> ImageGrid:
        return self.grids[-1]

    @cached_property
    def forced(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(grid.forced for grid in self.grids))


def require_grid(layout: Layout | None, user: str) -> ImageGrid:
    """Return a layout that is a grid; InputError with what needs its rows, the `user`, if it is another."""
    if isinstance(layout, ImageGrid):
        return layout
    raise InputError("layout", str(layout), f"the grid of one image: {user} goes by its rows")


class Grammar(Rows):
    """Syntax tokens of a batch of outputs, on the device.

    Args:
        rows: B rows of `Layout.forced`; () for one without a layout, all of whose places are free.
        device: of the places.

    Attributes:
        forced: [B, L + 1] the syntax token at each place of the output, or FREE; the last column is FREE and
            stands for all places beyond the output's end, where a draft may end up.
    """

    row_fields = named(RowField("forced", FREE))

    def __init__(self, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        length = 1 + max(map(len, rows), default=0)
        self.forced = torch.tensor([[*row, *[FREE] * (length - len(row))] for row in rows], device=device)

    def at(self, place: Tensor) -> Tensor:
        """[B, n] the syntax token at output places [B, n], or FREE."""
        return self.forced.gather(1, place.clamp(0, self.forced.shape[1] - 1))


def exclude(logits: Tensor, forced: Tensor, codes: int, tokens: Tensor | None = None) -> Tensor:
    """Apply the grammar to logits [B, n, V]: codes alone at cells, at forced places the syntax token alone.

    Args:
        forced: [B, n] or [B, 1], from `Grammar.at`.
        codes: K, the size of the codebook.
        tokens: [V] the tokens that the logits are of; None for all, in order.
    """
    token = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
    allowed = torch.where(forced[..., None] == FREE, token < codes, token == forced[..., None])
    return logits.masked_fill(~allowed, float("-inf"))
