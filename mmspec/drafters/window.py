"""Places of a Jacobi window: which are free, and what stands there before the target has spoken of them.

Initial drafts after visual-ar-decoding.md sections 3.2 and 4.4. Each is labelled with a law that is really
its own: one-hot only where the token is a function of the tokens before it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from mmspec.decoding.image_grid import FREE, ImageGrid

NEIGHBOURS = ("repeat", "above")


class WindowLayout:
    """The output's places on the device; without a grid they are endless, and all are free.

    Attributes:
        length: number of places.
        has_syntax: True if the grammar forces some of them.
    """

    def __init__(self, grid: ImageGrid | None, vocabulary: int, device: torch.device) -> None:
        forced = [] if grid is None else grid.forced
        codes = vocabulary if grid is None else grid.codebook_size
        self.length = torch.iinfo(torch.long).max if grid is None else grid.length
        self.stride = 1 if grid is None else grid.stride
        self.has_syntax = any(token != FREE for token in forced)
        self._forced = torch.tensor([*forced, FREE], device=device)
        self._cells = torch.tensor([i for i, token in enumerate(forced) if token == FREE], device=device)
        self.uniform = (torch.arange(vocabulary, device=device) < codes).float() / codes
        """[V] equal shares for every code; for every token where there is no grid."""

    def forced(self, place: Tensor) -> Tensor:
        """The token that the grammar forces at each place, or FREE; of the shape of `place`."""
        return self._forced[place.clamp(0, len(self._forced) - 1)]

    def left(self, place: Tensor, covered: Tensor) -> Tensor:
        """[B, n] the cell that each place repeats: in raster order, the last before `covered` [B, 1]."""
        return self._cells[torch.searchsorted(self._cells, covered) - 1].expand_as(place)

    def above(self, place: Tensor, covered: Tensor) -> Tensor:
        """[B, n] the nearest cell before `covered` [B, 1] in the same column; in the first row, `left`."""
        rows_up = (place - covered).clamp_min(0) // self.stride + 1
        upper = place - rows_up * self.stride
        return torch.where(upper >= 0, upper, self.left(place, covered))

    def copy(
        self, init: str, place: Tensor, covered: Tensor, tokens: Tensor, history: Sequence[Sequence[int]]
    ) -> Tensor:
        """[B, n] the tokens of the neighbours of each place.

        Args:
            init: "repeat" or "above".
            place: [B, n] consecutive output places; the first is that of the newest emitted token.
            covered: [B, 1] the first place that holds no token yet.
            tokens: [B, n] the tokens in these places, as far as they are covered.
            history: B lists of committed token ids, prompt included, the newest last.
        """
        reach = self.stride + 1  # as far back as the cell above the next place, or the one before a row's end
        recent = torch.tensor([([0] * reach + list(row[-reach:]))[-reach:] for row in history])
        known = torch.cat([recent.to(tokens.device), tokens[:, 1:]], 1)
        source = (self.left if init == "repeat" else self.above)(place, covered)
        index = source - place[:, :1] + reach - 1
        return known.gather(1, index.clamp(0, known.shape[1] - 1))  # places beyond the end have no neighbour
