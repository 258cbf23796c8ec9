"""Drafts of an LPD image's next states: the image after 1, 2, ... more groups, scored in one forward pass.

FreeDave (2510.00294) on a model with queries for cells (LPD, 2507.01957), whose groups come in a known order.
Tokens of the next groups are drafted; queries of each group see the drafts of the groups before it alone. The
target's own draws are accepted as long as they equal the drafts. A draw uses the noise of its cell in every
state, so that it is often the same in a state that is partly wrong: a token that was drawn and not decided is
the next draft, as in a Jacobi window with the target's noise.
"""

from __future__ import annotations

from dataclasses import replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.accelerator import Accelerator, pair
from mmspec.core.canvas import Canvas
from mmspec.core.distributions import AnyDistribution
from mmspec.core.draft import Draft
from mmspec.core.interfaces import DraftSession, TargetOutput
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Fill
from mmspec.errors import InputError
from mmspec.families.lpd.target import CellStates
from mmspec.families.parallel_images.cells import OrderedCellsDrafter, layout_of
from mmspec.families.parallel_images.target import ParallelImageTarget
from mmspec.open_types import Keywords
from mmspec.places.state_walk import CellWalk
from mmspec.validation import is_integer

__all__ = ["CellStatesDrafter", "lpd"]

MAX_STATES = 128


class CellStatesSession(DraftSession):
    """States of the images of a batch; each row advances by the number of groups that its own walk decides.

    Attributes:
        order: [B, N + 1] cells of each image in their order, and N after them.
        group: [N + 1] group of each rank in the order; after the image, a number far from all others.
        begins: [G + 1] rank at which each group begins.
        done: [B] groups that are decided.
        newest: [B, N + 1] the token that was last drawn at each cell.
    """

    def __init__(self, drafter: CellStatesDrafter, batch: PromptBatch) -> None:
        layout, device = layout_of(batch.requests), batch.prefill.logits.device
        self.counts, self.states, self.cells = drafter.order.counts(layout), drafter.states, layout.cells
        order = drafter.order.draw(layout, batch.random)
        self.order = pad(order, (0, 1), value=self.cells)
        groups, counts = len(self.counts), torch.tensor(self.counts, device=device)
        number = torch.arange(groups, device=device).repeat_interleave(counts)
        self.group = pad(number, (0, 1), value=groups + 2 * self.states)
        self.begins = pad(counts.cumsum(0), (1, 0))
        self.done = torch.zeros(len(order), dtype=torch.long, device=device)
        self.newest = torch.zeros_like(self.order)

    def open(self, canvas: Canvas) -> Draft:
        canvas.reserve(2 * self.cells)
        return self._states(self._ranks(self.done, 0), self._ranks(self.done, 0))

    def propose(self, canvas: Canvas) -> Draft:
        # the next walk may need drafts of that many groups after those drafted so far
        ahead = 2 * self.states - 1
        return self._states(self._ranks(self.done - 1, self.states), self._ranks(self.done, ahead))

    def _ranks(self, first: Tensor, count: int) -> tuple[Tensor, Tensor]:
        """Ranks and turns of the cells of `count` groups from group `first` [B]; padding has turn `count`."""
        rank = self.begins[first.clamp_min(0)][:, None] + torch.arange(
            widest(self.counts, count), device=first.device
        )
        rank = rank.clamp_max(self.cells)
        turn = (self.group[rank] - first[:, None]).clamp_max(count)
        return rank.where(turn < count, self.cells), turn

    def _states(self, read: tuple[Tensor, Tensor], asked: tuple[Tensor, Tensor]) -> CellStates:
        """Build the draft from tokens to read and cells to query, given by ranks and turns."""
        (rank_read, turn_read), (rank, turn) = read, asked
        fresh, places = self.order.gather(1, rank_read), self.order.gather(1, rank)
        kept = torch.zeros_like(self.order, dtype=torch.bool)
        kept.scatter_(1, self.order, self.group < self.done[:, None] - 1)
        exists = rank < self.cells
        made = CellStates.single(
            self.newest.gather(1, places),
            places,
            exists,
            torch.arange(self.cells + 1, device=kept.device).expand_as(kept),
            kept[:, None],
            completes=self.cells,
            fresh=fresh,
            tokens_of_fresh=self.newest.gather(1, fresh),
            kept=kept,
            ranks=rank,
            begin=0,
            quota=0,
            last=self.cells,
            turns=turn,
            turns_of_fresh=turn_read,
            states=self.states,
        )
        return replace(made, valid=exists[:, :, None])

    def observe(
        self, draft: CellStates, output: TargetOutput, scores: AnyDistribution, verdict: Fill
    ) -> None:
        self.newest.scatter_(1, verdict.places, verdict.values)
        steps = (draft.turns + 1).masked_fill(~verdict.decided, 0)
        self.done = self.done + steps.amax(-1)


class CellStatesDrafter(OrderedCellsDrafter):
    """Drafts the tokens of the next groups of cells, and the states that follow (FreeDave, 2510.00294).

    Args:
        states: most groups that a forward pass may decide, 2 or more.
        options: of `DecodingOrder`; None is the model's own.

    Raises:
        InputError: a value is out of range.
    """

    judged_by = CellWalk
    session = CellStatesSession

    def __init__(self, states: int = 8, **options: Any) -> None:
        super().__init__(**options)
        if not is_integer(states) or not 2 <= states <= MAX_STATES:
            raise InputError("states", states, f"must be an integer from 2 to {MAX_STATES}")
        self.states = states

    def fitted(self, target: ParallelImageTarget) -> Self:
        fitted = super().fitted(target)
        fitted.max_nodes = 1 + widest(fitted.order.counts(target.grid), 2 * self.states - 1)
        return fitted


def widest(counts: list[int], groups: int) -> int:
    """Return the most cells of `groups` consecutive groups."""
    ends = [0, *accumulate(counts)]
    return max(end - begin for begin, end in zip(ends, ends[groups:] or ends[-1:], strict=False))


def lpd(
    order: str | None = None,
    generation_steps: int | None = None,
    repulsion_threshold: int | None = None,
    proximity_threshold: float | None = None,
    regions: int | None = None,
    states: int = 1,
) -> Accelerator:
    """Groups of cells of an image, decided by learned queries (LPD, 2507.01957).

    Args:
        order: see `OrderedCellsDrafter`; model's own, which is its plain decoding if None.
        generation_steps, repulsion_threshold, proximity_threshold, regions: see `OrderedCellsDrafter`;
            model's own if None.
        states: most groups that a forward pass decides, 1 to 128. The images are the same as with 1
            (FreeDave, 2510.00294).
    """
    thresholds = {"repulsion_threshold": repulsion_threshold, "proximity_threshold": proximity_threshold}
    steps = {"generation_steps": generation_steps, "regions": regions}
    options: Keywords = {"order": order, **steps, **thresholds}
    if states == 1:
        return pair("lpd", OrderedCellsDrafter(**options))
    return Accelerator("lpd", CellStatesDrafter(states, **options), CellWalk())
