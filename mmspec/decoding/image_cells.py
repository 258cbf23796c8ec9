"""Images whose cells are decoded out of raster order: their state on the host, and the next forward."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mmspec.decoding.image_grid import FREE, ImageGrid


class Order(Protocol):
    """Interface of a decoding order, as far as an image needs it."""

    def open_rows(self, decoded: Sequence[int], columns: int) -> list[int]:
        """Rows whose next cell may be decoded now."""

    def puts_on_trial(self, row: int, decoded: Sequence[int], columns: int) -> bool:
        """Return whether the first token of that row is put on trial: drawn now, judged a forward later."""


@dataclass(frozen=True)
class Step:
    """Plan of one forward for one image. Its nodes are the tokens that are fed.

    Attributes:
        places: output index of each node, ascending.
        tokens: token fed there: that of the place, or a stand-in.
        known: False for stand-ins, whose keys only they themselves may see.
        cells: output indices that are decoded, each from the node at the place before it.
        asked: nodes whose logits are used.
        proposed: the node after which a token goes on trial, or None.
        judged: the node after which the token on trial is judged, or None; the token is the next node.
    """

    places: list[int]
    tokens: list[int]
    known: list[bool]
    cells: list[int]
    asked: list[int]
    proposed: int | None
    judged: int | None


class Image:
    """Decoding state of one image.

    Attributes:
        grid: its layout.
        tokens: [length] token at each place, FREE where none is decoded. Syntax is there from the start.
        decoded: number of cells that each row has, from the left.
        fresh: places decoded by the last forward, whose keys are not cached yet.
        trial: the place of a token on trial, or None.
        emitted: number of tokens emitted, in raster order.
    """

    def __init__(self, grid: ImageGrid) -> None:
        self.grid = grid
        self.tokens = list(grid.forced)
        self.decoded = [0] * grid.rows
        self.fresh: list[int] = []
        self.trial: int | None = None
        self.emitted = 0

    def put(self, decided: dict[int, int]) -> None:
        """Write tokens at places, the next ones of their rows."""
        for place in sorted(decided):
            self.tokens[place] = decided[place]
            self.decoded[place // self.grid.stride] = place % self.grid.stride + 1
        self.fresh = sorted(decided)

    def step(self, order: Order) -> Step:
        """Plan the next forward: feed all fresh tokens, and the token before every cell that is decoded."""
        columns = self.grid.columns
        rows = order.open_rows(self.decoded, columns)
        cells = [row * self.grid.stride + self.decoded[row] for row in rows]
        begun = [row for row in rows if self.decoded[row] == 0]
        trials = [row for row in begun if order.puts_on_trial(row, self.decoded, columns)]
        asked = [cell - 1 for cell in [*cells, *([] if self.trial is None else [self.trial])]]
        places = sorted({*self.fresh, *asked}) or [0]  # a finished image still needs a node
        return Step(
            places,
            [self.latest(place) for place in places],
            [self.tokens[place] != FREE for place in places],
            cells,
            [places.index(place) for place in asked],
            places.index(trials[0] * self.grid.stride - 1) if trials else None,
            None if self.trial is None else places.index(self.trial - 1),
        )

    def latest(self, place: int) -> int:
        """Token of that place, or of the nearest place before it that has one."""
        while self.tokens[place] == FREE:
            place -= 1
        return self.tokens[place]

    def commit(self, step: Step, chosen: Sequence[int], verdict: Sequence[int]) -> None:
        """Write the tokens that a forward has decided.

        Args:
            chosen: the target's token after each node.
            verdict: whether the token on trial was accepted, and the token after it or in its stead.
        """
        decided = {cell: chosen[step.places.index(cell - 1)] for cell in step.cells}
        if self.trial is not None:
            accepted, token = verdict
            decided.pop(self.trial + 1)
            decided[self.trial + accepted] = token
        self.put(decided)
        self.trial = None if step.proposed is None else step.places[step.proposed] + 1

    def ready(self) -> list[int]:
        """Take the tokens that are complete in raster order and not emitted yet."""
        start, end = self.emitted, self.emitted
        while end < len(self.tokens) and self.tokens[end] != FREE and end != self.trial:
            end += 1
        self.emitted = end
        return self.tokens[start:end]


def lay_out(steps: Sequence[Step], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Batch the steps: tokens, places and known, [B, n] each; short rows repeat their last node."""
    nodes = max(len(step.places) for step in steps)
    tokens, places, known = (
        torch.tensor([row + row[-1:] * (nodes - len(row)) for row in rows], device=device)
        for rows in zip(*((step.tokens, step.places, step.known) for step in steps), strict=True)
    )
    return tokens, places, known
