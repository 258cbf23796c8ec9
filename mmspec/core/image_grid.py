"""Layout and grammar of an image as a sequence of tokens: codes, and the syntax tokens between them.

Layouts do not depend on models. Tokens are codebook indices; syntax tokens have the ids from the codebook's
size on.
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
    """Layout of an output: its length, and where the grammar forces a syntax token between the codes.

    Attributes:
        codebook_size: K; a place marked FREE holds a code from 0 to K - 1.
    """

    codebook_size: int

    @property
    @abstractmethod
    def forced(self) -> tuple[int, ...]:
        """[length] the syntax token, K or more, that is forced at each output index, or FREE."""

    @property
    @abstractmethod
    def image(self) -> ImageGrid:
        """Grid of the final image."""

    @property
    def length(self) -> int:
        """Number of tokens of the whole output, syntax tokens included."""
        return len(self.forced)

    @property
    def cells(self) -> int:
        """Number of codes of the whole output."""
        return self.forced.count(FREE)

    def codes(self, output: Sequence[int]) -> list[int]:
        """Codes of a complete or truncated output, in order and without syntax tokens."""
        return [token for token, forced in zip(output, self.forced, strict=False) if forced == FREE]

    def __str__(self) -> str:
        return f"{self.length} tokens"


@dataclass(frozen=True)
class ImageGrid(Layout):
    """Layout of an image: cells in raster order, with forced syntax tokens.

    Attributes:
        rows, columns: number of rows and columns of cells.
        codebook_size: K; a cell holds a code from 0 to K - 1.
        row_end: syntax token after each row of cells, K or more; None if there is none.
        ending: syntax tokens after the last cell (and its row end), K or more.
        last_row_end: syntax token that replaces `row_end` in the last row; None for `row_end` there too.
        frames: number of video frames, stacked from top to bottom; 1 for an image.

    Raises:
        InputError: there are no cells, a syntax token has the id of a code, or `frames` does not divide the
            rows.
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
                raise InputError(name, getattr(self, name), "must be at least 1")
        if self.rows % self.frames:
            raise InputError("frames", self.frames, f"must divide the number of rows, {self.rows}")
        if self.row_end is None and self.last_row_end is not None:
            raise InputError("last_row_end", self.last_row_end, "must be None when row_end is None")
        for token in (self.row_end, self.last_row_end, *self.ending):
            if token is not None and token < self.codebook_size:
                raise InputError(
                    "syntax token", token, f"must be {self.codebook_size} or more; lower ids are codes"
                )

    @property
    def image(self) -> ImageGrid:
        return self

    @property
    def stride(self) -> int:
        """Number of tokens from a cell to the one below it."""
        return self.columns + (self.row_end is not None)

    @property
    def cells(self) -> int:
        return self.rows * self.columns

    @property
    def frame(self) -> ImageGrid:
        """The grid of one frame."""
        return ImageGrid(self.rows // self.frames, self.columns, self.codebook_size, self.row_end)

    @property
    def length(self) -> int:  # without building `forced`: the size may be too large
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
    """Layout of consecutive grids: scales of an image, frames of a video, a preview and its image.

    Attributes:
        grids: with one codebook size. The ending of a grid separates it from the next; the last grid is the
            image's.

    Raises:
        InputError: there is no grid, or there are several codebook sizes.
    """

    grids: tuple[ImageGrid, ...]
    codebook_size: int = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(sizes := {grid.codebook_size for grid in self.grids}) != 1:
            raise InputError("grids", sorted(sizes), "must have exactly one codebook size")
        object.__setattr__(self, "codebook_size", sizes.pop())

    @property
    def image(self) -> ImageGrid:
        return self.grids[-1]

    @cached_property
    def forced(self) -> tuple[int, ...]:
        return tuple(chain.from_iterable(grid.forced for grid in self.grids))


def require_grid(layout: Layout | None, user: str) -> ImageGrid:
    """Return the layout if it is a single grid; raise InputError, which names the `user`, otherwise."""
    if isinstance(layout, ImageGrid):
        return layout
    got = "no image" if layout is None else str(layout)
    raise InputError("image layout", got, f"must be the grid of a single image, whose rows {user} reads")


class Grammar(Rows):
    """Forced syntax tokens of a batch of outputs, on the device.

    Args:
        rows: B rows of `Layout.forced`; () for an output without a layout, in which all places are free.
        device: device of the tensors.

    Attributes:
        forced: [B, L + 1] the syntax token at each place of the output, or FREE; the last column is FREE and
            represents all places beyond the output's end, which a draft may contain.
    """

    row_fields = named(RowField("forced", FREE))

    def __init__(self, rows: Sequence[Sequence[int]], device: torch.device) -> None:
        length = 1 + max(map(len, rows), default=0)
        self.forced = torch.tensor([[*row, *[FREE] * (length - len(row))] for row in rows], device=device)

    def at(self, place: Tensor) -> Tensor:
        """[B, n] syntax tokens at output places [B, n], or FREE."""
        return self.forced.gather(1, place.clamp(0, self.forced.shape[1] - 1))


def exclude(logits: Tensor, forced: Tensor, codes: int, tokens: Tensor | None = None) -> Tensor:
    """Apply the grammar to logits [B, n, V]: cells allow codes alone, forced places their syntax token alone.

    Args:
        forced: [B, n] or [B, 1], from `Grammar.at`.
        codes: K, the size of the codebook.
        tokens: [V] token ids of the logits; None for all, in order.
    """
    token = torch.arange(logits.shape[-1], device=logits.device) if tokens is None else tokens
    allowed = torch.where(forced[..., None] == FREE, token < codes, token == forced[..., None])
    return logits.masked_fill(~allowed, float("-inf"))
