"""The host's side of an image whose cells are decoded out of order: what stands where, what is fed next."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from mmspec.decoding.image_grid import FREE, ImageGrid


class Order(Protocol):
    """What an image asks of a schedule."""

    def open_rows(self, decoded: Sequence[int], columns: int) -> list[int]:
        """The rows whose next cell may be decoded now."""

    def puts_on_trial(self, row: int, decoded: Sequence[int], columns: int) -> bool:
        """Whether the first token of that row is asked for once more."""


@dataclass(frozen=True)
class Step:
    """What one forward feeds and asks, for one image. Nodes are what it feeds.

    Attributes:
        places: output index of each node, ascending.
        tokens: what is fed there: the token of that place, or a stand-in.
        known: False for stand-ins, whose keys only they themselves may see.
        cells: output indices that are decoded; each is asked for at the node before it.
        asked: nodes whose logits decide something.
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
    """The state of one image.

    Attributes:
        grid: its layout.
        tokens: [length] what stands at each place, FREE where nothing does. Syntax stands from the start.
        decoded: number of cells that each row has, from the left.
        fresh: places decoded by the last forward: they have no keys yet.
        trial: the place of a token on trial, or None.
        emitted: length of the part in raster order that has been given out.
    """

    def __init__(self, grid: ImageGrid) -> None:
        self.grid = grid
        self.tokens = list(grid.forced)
        self.decoded = [0] * grid.rows
        self.fresh: list[int] = []
        self.trial: int | None = None
        self.emitted = 0

    def put(self, decided: dict[int, int]) -> None:
        """Tokens for places; a row's places are its next ones."""
        for place in sorted(decided):
            self.tokens[place] = decided[place]
            self.decoded[place // self.grid.stride] = place % self.grid.stride + 1
        self.fresh = sorted(decided)

    def step(self, order: Order) -> Step:
        """What to feed and ask next: all fresh tokens, and whatever precedes a cell that is asked for."""
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
        """The token of that place, or of the nearest one before it that has one."""
        while self.tokens[place] == FREE:
            place -= 1
        return self.tokens[place]

    def commit(self, step: Step, chosen: Sequence[int], verdict: Sequence[int]) -> None:
        """Take the tokens of a step.

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
        """Tokens that follow in raster order and have not been given out."""
        start, end = self.emitted, self.emitted
        while end < len(self.tokens) and self.tokens[end] != FREE and end != self.trial:
            end += 1
        self.emitted = end
        return self.tokens[start:end]


def lay_out(steps: Sequence[Step], device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Tokens, places and which are known of all images, [B, n] each; the last node fills short rows up."""
    nodes = max(len(step.places) for step in steps)
    tokens, places, known = (
        torch.tensor([row + row[-1:] * (nodes - len(row)) for row in rows], device=device)
        for rows in zip(*((step.tokens, step.places, step.known) for step in steps), strict=True)
    )
    return tokens, places, known
