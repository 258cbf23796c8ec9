"""Places of a Jacobi window: which are free, and what stands there before the target has spoken of them.

Initial drafts after visual-ar-decoding.md sections 3.2 and 4.4. Each is labelled with a distribution that is
really its own: one-hot only where the token is a function of the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.decoding.image_grid import FREE, ImageGrid

NEIGHBOURS = ("repeat", "above")


class WindowLayout:
    """The output's places on the device. Rows without a grid have endlessly many, all of them free.

    Attributes:
        length: [B, 1] number of places.
        uniform: [B, 1, V] equal shares for every code; for every token in rows without a grid.
        has_syntax: True if a grammar forces some places.
    """

    def __init__(self, grids: Sequence[ImageGrid | None], vocabulary: int, device: torch.device) -> None:
        images = {row: grid for row, grid in enumerate(grids) if grid is not None}
        places = 1 + max((grid.length for grid in images.values()), default=0)
        forced = torch.full((len(grids), places), FREE)
        length = torch.full((len(grids), 1), torch.iinfo(torch.long).max)
        stride, codes = torch.ones_like(length), torch.full_like(length, vocabulary)
        for row, grid in images.items():
            forced[row, : grid.length] = torch.tensor(grid.forced)
            length[row], stride[row], codes[row] = grid.length, grid.stride, grid.codebook_size
        self.has_syntax = any(token != FREE for grid in images.values() for token in grid.forced)
        self.reach = 1 + int(stride.max())  # back to the cell above the next place, or before a row's end
        free = torch.arange(places).where(forced == FREE, 0)
        self._left = free.cummax(-1).values.roll(1, -1).to(device)  # [B, places] the last free one before
        self._forced = forced.to(device)
        self._stride = stride.to(device)
        self.length = length.to(device)
        self.uniform = ((torch.arange(vocabulary) < codes).float() / codes)[:, None].to(device)

    def forced(self, place: Tensor) -> Tensor:
        """[B, n] the token that the grammar forces at each place [B, n], or FREE."""
        return look_up(self._forced, place)

    def left(self, place: Tensor, first: Tensor) -> Tensor:
        """[B, n] the cell that each place repeats: in raster order, the last before `first` [B, 1]."""
        return look_up(self._left, first).expand_as(place)

    def above(self, place: Tensor, first: Tensor) -> Tensor:
        """[B, n] the last place before `first` [B, 1] in the column of each; in the first row, as `left`."""
        upper = place - ((place - first).clamp_min(0) // self._stride + 1) * self._stride
        return torch.where(upper >= 0, upper, self.left(place, first))

    def copy(
        self, init: str, place: Tensor, first: Tensor, tokens: Tensor, history: Sequence[Sequence[int]]
    ) -> Tensor:
        """[B, n] the token of each place's neighbour.

        Args:
            init: "repeat" or "above".
            place: [B, n] consecutive places; the first of them is that of the newest emitted token.
            first: [B, 1] the first place that holds no token yet.
            tokens: [B, n] the tokens in these places, as far as they have any.
            history: B lists of committed token ids, prompt included, the newest last.
        """
        recent = torch.tensor(
            [([0] * self.reach + list(row[-self.reach :]))[-self.reach :] for row in history]
        )
        known = torch.cat([recent.to(tokens.device), tokens[:, 1:]], 1)
        source = (self.left if init == "repeat" else self.above)(place, first)
        return look_up(known, source - place[:, :1] + self.reach - 1)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Rows of a table [B, m] at [B, n]; beyond its ends, where nothing is ever kept, its last entries."""
    return table.gather(1, index.clamp(0, table.shape[1] - 1))
