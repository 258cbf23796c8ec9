"""Places of a Jacobi window: which are free, and the initial drafts of newly uncovered ones.

Initial drafts are those of SJD's code (2410.01699), but with an honest q: one-hot only where the token is a
function of the tokens before it. A random draft scored as one-hot would be accepted with probability p(x)
alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.decoding.image_grid import FREE, Grammar, ImageGrid

NEIGHBOURS = ("repeat", "above")


class WindowLayout:
    """Output places of a batch, on the device. Rows without a grid have endlessly many, all of them free.

    Attributes:
        length: [B, 1] number of places.
        uniform: [B, 1, V] uniform over the codes; over all tokens in rows without a grid.
        has_syntax: True if a grammar forces some places.
    """

    def __init__(self, grids: Sequence[ImageGrid | None], vocabulary: int, device: torch.device) -> None:
        images = {row: grid for row, grid in enumerate(grids) if grid is not None}
        self._grammar = Grammar(grids, device)
        length = torch.full((len(grids), 1), torch.iinfo(torch.long).max)
        stride, codes = torch.ones_like(length), torch.full_like(length, vocabulary)
        for row, grid in images.items():
            length[row], stride[row], codes[row] = grid.length, grid.stride, grid.codebook_size
        is_free = self._grammar.forced == FREE
        self.has_syntax = not bool(is_free.all())
        self.reach = 1 + int(stride.max())  # back to the cell above the next place, or before a row's end
        free = torch.arange(is_free.shape[1], device=device).where(is_free, 0)
        self._left = free.cummax(-1).values.roll(1, -1)  # [B, places] the last free one before
        self._stride = stride.to(device)
        self.length = length.to(device)
        self.uniform = ((torch.arange(vocabulary) < codes).float() / codes)[:, None].to(device)

    def forced(self, place: Tensor) -> Tensor:
        """[B, n] the token that the grammar forces at each place [B, n], or FREE."""
        return self._grammar.at(place)

    def left(self, place: Tensor, first: Tensor) -> Tensor:
        """[B, n] the cell that each place repeats: in raster order, the last before `first` [B, 1]."""
        return look_up(self._left, first).expand_as(place)

    def above_cell(self, place: Tensor) -> Tensor:
        """[B, n] the place one row above each; negative in the first row."""
        return place - self._stride

    def above(self, place: Tensor, first: Tensor) -> Tensor:
        """[B, n] the last place before `first` [B, 1] in the column of each; in the first row, as `left`."""
        upper = place - ((place - first).clamp_min(0) // self._stride + 1) * self._stride
        return torch.where(upper >= 0, upper, self.left(place, first))

    def copy(self, init: str, place: Tensor, first: Tensor, tokens: Tensor, recent: Tensor) -> Tensor:
        """[B, n] token of each place's neighbour, as an initial draft.

        Args:
            init: "repeat" or "above".
            place: [B, n] consecutive places; the first of them is that of the newest emitted token.
            first: [B, 1] the first place that holds no token yet.
            tokens: [B, n] the tokens in these places, as far as they have any.
            recent: [B, reach] the newest tokens.
        """
        known = torch.cat([recent, tokens[:, 1:]], 1)
        source = (self.left if init == "repeat" else self.above)(place, first)
        return look_up(known, source - place[:, :1] + self.reach - 1)


def look_up(table: Tensor, index: Tensor) -> Tensor:
    """Look up index [B, n] in the rows of a table [B, m], clamped to its ends, where nothing is ever kept."""
    return table.gather(1, index.clamp(0, table.shape[1] - 1))
