"""Drafters of image models that decide several cells in a forward pass, in a decoding order.

Targets are those of `mmspec.families.parallel_images.target`.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from itertools import accumulate
from typing import Any, Self

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.draft import Draft, DraftKind
from mmspec.core.image_grid import GridSequence, Layout, require_grid
from mmspec.core.interfaces import DraftSession, Request
from mmspec.core.promise import Level
from mmspec.core.sampling import Sampler, processor_names
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.errors import InputError
from mmspec.families.parallel_images.orders import DecodingOrder
from mmspec.families.parallel_images.target import CellGroup, ParallelImageTarget
from mmspec.open_types import Keywords
from mmspec.places.order import Groups, OrderSession
from mmspec.targets import AnyTarget

__all__ = ["CellsDrafter", "OrderedCellsDrafter", "group_of", "layout_of"]

TOGETHER = "the model's own groups of cells, with the cells of a forward pass drawn independently"


class OrderedCellsSession(OrderSession):
    """Images whose cells are decided in an order that is fixed at the start.

    Attributes:
        read: number of cells of each image whose tokens were read.
        forwards: number of groups that were drafted.
    """

    def __init__(self, drafter: OrderedCellsDrafter, batch: PromptBatch) -> None:
        self.drafter, self.layout = drafter, layout_of(batch.requests)
        self.order = drafter.order.draw(self.layout, batch.random)
        self.counts = drafter.order.counts(self.layout)
        self.ends = [list(accumulate(self.counts))] * len(batch.requests)
        self.forwards = self.read = 0

    def open(self, canvas: Canvas) -> Draft:
        nothing = super().open(canvas)
        return self.propose(canvas) if self.drafter.from_prompt else nothing

    def count_decided(self, row: int, canvas: Canvas) -> int:
        return sum(self.counts[: self.forwards])

    def block(self, canvas: Canvas, places: Tensor, exists: Tensor, groups: Groups) -> CellGroup:
        begin = groups[0][0]
        ranks = begin + torch.arange(places.shape[1], device=places.device).expand_as(places)
        last = self.layout.cells
        if isinstance(self.layout, GridSequence):  # guidance rises by scale, not by cell
            ranks, last = torch.full_like(places, self.forwards), max(1, len(self.counts) - 1)
        fresh, before = self.order[:, self.read : begin], self.order[:, : self.read]
        self.read, self.forwards = begin, self.forwards + (places.shape[1] > 0)
        return group_of(canvas, self.layout, places, fresh, before, ranks, begin, places.shape[1], last)


def group_of(
    canvas: Canvas,
    layout: Layout,
    places: Tensor,
    fresh: Tensor,
    before: Tensor,
    ranks: Tensor,
    begin: int,
    quota: int,
    last: int,
) -> CellGroup:
    """Build the draft of some cells.

    Args:
        canvas: the output so far.
        layout: layout of the images.
        places: [B, L] cells to decide.
        fresh: [B, k] cells that were decided and not read yet.
        before: [B, m] cells that were read; N is ignored.
        ranks, begin, quota, last: as of `CellGroup`.
    """
    cells = layout.cells
    kept = torch.zeros(len(places), cells + 1, dtype=torch.bool, device=places.device)
    kept.scatter_(1, before, True)
    kept[:, -1] = False
    slot = torch.arange(cells + 1, device=places.device).expand(len(places), -1)
    return CellGroup.single(
        torch.zeros_like(places),
        places,
        torch.ones_like(places, dtype=torch.bool),
        slot,
        kept[:, None],
        completes=cells,
        fresh=fresh,
        tokens_of_fresh=canvas.tokens.gather(1, fresh),
        kept=kept,
        ranks=ranks,
        begin=begin,
        quota=quota,
        last=last,
    )


class CellsDrafter(SessionDrafter):
    """Base of drafters of cells that a model decides together."""

    kind = DraftKind.POINT
    max_nodes = 0  # besides the cells of the image
    keeps = TOGETHER
    decides_places = True
    name: str

    def check(self, target: AnyTarget) -> None:
        if not isinstance(target, ParallelImageTarget):
            rule = "needs a model that predicts many cells in a forward pass, such as LPD"
            raise InputError("accelerator", self.name, rule)
        if not target.any_cells:
            rule = "needs a model that predicts any cells (LPD); this one has an order of its own: use 'none'"
            raise InputError("accelerator", self.name, rule)

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        if sampler.processors:
            rule = "must be empty: this model does not decode token by token"
            raise InputError("logits_processor", processor_names(sampler), rule)
        cells = layout_of(requests).cells
        if stopping.max_new_tokens != cells:
            rule = f"must be {cells}, the cells of the image"
            raise InputError("max_new_tokens", stopping.max_new_tokens, rule)


class OrderedCellsDrafter(CellsDrafter):
    """Decides cells in groups that are fixed at the start, one group per forward pass (LPD, 2507.01957).

    The cells of a group are drawn independently of each other. The model's own order is its plain decoding,
    which "exact" refers to; other orders are lossy.

    Args:
        options: the model's own if None. Options: see `DecodingOrder`.

    Raises:
        InputError: a value outside its range.
    """

    name = "lpd"
    session: Callable[..., DraftSession] = OrderedCellsSession
    order: DecodingOrder
    from_prompt: bool

    def __init__(self, **options: object) -> None:
        self.options: Keywords = {name: value for name, value in options.items() if value is not None}
        DecodingOrder(**self.options)  # checks the values
        self.exactness = Level.LOSSY if self.options else Level.EXACT

    def fit(self, target: AnyTarget) -> Self:
        self.check(target)
        return self.fitted(target)

    def fitted(self, target: Any) -> Self:
        """Return this drafter for a target, whose own order gives the options that are None."""
        fitted, own = copy.copy(self), DecodingOrder(**target.plain)
        other = self.options.get("order", own.order) != own.order
        fitted.order = DecodingOrder(**self.options) if other else DecodingOrder(**asdict(own) | self.options)
        fitted.from_prompt = target.from_prompt
        own = replace(own, generation_steps=fitted.order.generation_steps) if not other else own
        layout = target.layout_of(target.grid)
        sizes = [order.counts(layout) for order in (fitted.order, DecodingOrder(**target.plain))]
        fitted.exactness = Level.EXACT if fitted.order == own and sizes[0] == sizes[1] else Level.LOSSY
        return fitted


def layout_of(requests: Sequence[Request]) -> Layout:
    """The common layout of all images of a batch: one grid, or the grids of all scales.

    Raises:
        InputError: the layouts differ, or a request is not for an image.
    """
    layouts: set[Layout] = set()
    for layout in (request.layout for request in requests):
        several = layout if isinstance(layout, GridSequence) else None
        layouts.add(several or require_grid(layout, "an order of cells"))
    if len(layouts) != 1:
        raise InputError("requests", sorted(map(str, layouts)), "must have images of one size")
    return layouts.pop()
