"""Drafters of MAR: plain decoding in its own order of cells, and drafts of cells by a smaller MAR.

MAR (2406.11838) decides several cells in a forward pass, in an order of its own. A smaller masked model
drafts its cells one after another, as in CSpD (2411.11925).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.distributions import Continuous
from mmspec.core.draft import Draft, DraftKind
from mmspec.core.image_grid import require_grid
from mmspec.core.interfaces import Request
from mmspec.core.promise import Level
from mmspec.core.random_stream import Purpose
from mmspec.core.session import ModelDrafter, PromptBatch, SessionDrafter
from mmspec.errors import InputError
from mmspec.families.mar.target import CellBlock, MARSampler, MARTarget
from mmspec.families.parallel_images.orders import cells_by_forward, checkerboard_first
from mmspec.places.order import Groups, OrderSession
from mmspec.registry import did_you_mean
from mmspec.targets import AnyTarget
from mmspec.validation import check_draft_tokens, is_integer, require_number
from mmspec.vectors.denoising import Denoising
from mmspec.vectors.denoising_head import StepAnnealing

__all__ = ["ONE_BY_ONE", "CellModelDrafter", "CellOrderDrafter"]

ORDERS = ("random", "checkerboard")
#: The two reference distributions of a MAR. They differ, because the cells of one forward pass are drawn
#: independently of each other.
TOGETHER = "the published iterations, with the cells of a forward pass drawn independently"
ONE_BY_ONE = "one cell per forward pass, each given all before it"


class CellOrderSession(OrderSession):
    """Decoding order of a batch of images, whose groups are the cells of a forward pass.

    Attributes:
        counts: number of cells of each forward pass.
    """

    def __init__(self, drafter: CellOrderDrafter, batch: PromptBatch) -> None:
        grid, rows = require_grid(batch.requests[0].layout, "masked"), len(batch.requests)
        device = batch.prefill.logits.device
        self.cells, self.annealing = grid.cells, drafter.annealing
        self.place = torch.arange(grid.cells, device=device).expand(rows, -1)
        rank = batch.random.uniform(self.place, Purpose.ORDER, 1, torch.float64)[..., 0]
        if drafter.order == "checkerboard":
            rank = rank + checkerboard_first(grid, device)
        self.order = rank.argsort(-1)
        self.counts = cells_by_forward(grid.cells, drafter.iterations or min(64, grid.cells))
        self.ends = [list(accumulate(self.counts))] * rows
        self.forwards = 0

    def count_decided(self, row: int, canvas: Canvas) -> int:
        return sum(self.counts[: self.forwards])

    def block(self, canvas: Canvas, places: Tensor, exists: Tensor, groups: Groups) -> CellBlock:
        before, after = groups[0]
        made = self._cells(places, canvas, before, after)
        self.forwards += places.shape[1] > 0
        return made

    def _cells(self, cells: Tensor, canvas: Canvas, before: int | Tensor, after: int | Tensor) -> CellBlock:
        """A block with one lane for each cell [B, k]; `before` and `after` as of `CellBlock`."""
        return CellBlock.single(
            torch.zeros_like(canvas.tokens[:, :1]).expand(*cells.shape, -1),
            cells,
            torch.ones_like(cells, dtype=torch.bool),
            self.place,
            torch.ones_like(self.place, dtype=torch.bool)[:, None],
            completes=self.cells,
            iteration=min(self.forwards, len(self.counts) - 1),
            iterations=len(self.counts),
            before=before,
            after=after,
            annealing=self.annealing,
        )


class CellModelSession(CellOrderSession):
    """Draft model of a batch of images, which reads the decided cells and its own draft.

    A cell is drafted with the noise of its place. A cell that a round leaves open is drafted with the same
    noise again; that is valid, because no decision has used this noise.
    """

    def __init__(self, drafter: CellModelDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.drafter, self.random = drafter, batch.random
        self.sampler = batch.sampler.of_model(drafter.model)
        self.state, _ = drafter.model.prefill(batch.prompts, self.cells)
        self.counts = [1] * self.cells
        self.alone = math.ceil(drafter.prefill * self.cells)
        self.lanes = torch.arange(drafter.num_draft_tokens, device=drafter.model.device)

    def propose(self, canvas: Canvas) -> Draft:
        known = canvas.decided[:, : self.cells]
        is_known = known.gather(1, self.order)
        self.decided = known.sum(1)  # [B]: images differ after rejections
        cells = self.order.gather(1, is_known.long().argsort(dim=1, stable=True))  # open cells first
        if self.forwards < self.alone:
            draft = self._cells(cells[:, :1], canvas, *self._progress(self.lanes[:1]))
        else:
            draft = self._draft(cells[:, : self.drafter.num_draft_tokens], canvas)
        self.forwards += 1
        return draft

    def _draft(self, cells: Tensor, canvas: Canvas) -> CellBlock:
        """Draw a candidate for each cell [B, L], given those before it."""
        known, lanes = canvas.decided[:, : self.cells], cells.shape[1]
        self.state.known.zero_()
        self.state.write(self.place.where(known, self.cells), canvas.tokens[:, : self.cells])
        made, seen = list[tuple[Tensor, Tensor, Tensor, Denoising]](), known
        for lane in range(lanes):
            token, predicted = self._candidate(cells[:, lane], lane, canvas)
            made.append((seen, token, predicted.is_finite() & token.isfinite().all(-1), predicted))
            self.state.write(cells[:, lane : lane + 1], token[:, None])
            seen = seen | (self.place == cells[:, lane : lane + 1])
        *stacked, parts = zip(*made, strict=True)
        visible, candidates, usable = (torch.stack(each, 1) for each in stacked)
        ahead = self.lanes[:lanes]
        is_open = ahead < self.cells - self.decided[:, None]
        drafted = is_open & usable.long().cumprod(1).bool()
        views = visible.repeat_interleave(2, 1) if self.drafter.see_drafts else known[:, None]
        before, after = self._progress(ahead.clamp_min(lanes - 1) if self.drafter.shared_guidance else ahead)
        return CellBlock(
            torch.stack([torch.zeros_like(candidates), candidates], 2),
            torch.stack([torch.ones_like(drafted), drafted], 2),
            self.drafter.kind,
            Denoising.stack([Denoising.stack(parts).flat()]),
            (is_open & ~usable).any(-1),
            slots=cells[:, :, None].expand(-1, -1, 2),
            depths=self.place,
            starts=cells,
            visible=views,
            is_open=torch.stack([is_open, torch.zeros_like(is_open)], 2),
            completes=self.cells,
            iteration=self.forwards,
            iterations=self.cells,
            before=before,
            after=after,
            rolls_back=self.drafter.rollback,
        )

    def _progress(self, ahead: Tensor) -> tuple[Tensor, Tensor]:
        """Cells decided before and after lanes that follow `ahead` [L] cells of the draft."""
        before = (self.decided[:, None] + ahead).float().reshape(-1, 1, 1)
        return before, before + 1

    def _candidate(self, cell: Tensor, lane: int, canvas: Canvas) -> tuple[Tensor, Denoising]:
        """Draw a vector [B, d] for one cell [B] of each image, and return it with its denoising chain."""
        self.passes += 1
        one = self._cells(cell[:, None], canvas, *self._progress(self.lanes[lane : lane + 1]))
        conditions = self.drafter.model.score(self.state, one).logits
        predicted: Denoising = self.sampler(conditions, one, canvas.history, cell)
        token, q = predicted.at(torch.zeros_like(cell)).candidate(self.random, cell, Purpose.DRAFT)
        if self.drafter.last_noise or q.drawn is None:
            return token, q
        mean, _ = q.process.transition(q.drawn[:, -2], q.process.steps - 1)
        return mean, q


class CellOrderDrafter(SessionDrafter):
    """Decides the cells of an image in MAR's order: few in the first forward passes, and more in later ones.

    The cells of a forward pass are drawn independently of each other, as the model was trained for. With as
    many forward passes as cells, each cell is drawn given all before it.

    Args:
        iterations: forward passes per image, from 1 to its cells; 64 as published, and at most one per cell
            if None.
        order: order of the cells: "random"; or "checkerboard", the cells of one colour of a chessboard first,
            then the others, which have neighbours on all sides (GtR, 2510.17171), both in random order.
        last_steps: steps of the denoising head in the last forward pass, to which they decrease from the
            first one on (DiSA, 2505.20297); equally many in all if None.
        annealing: shape of the decrease of `last_steps`: "linear", "cosine" or "two-stage".

    Raises:
        InputError: a value outside its range.
    """

    kind = DraftKind.POINT
    distribution = Continuous
    max_nodes = 0  # besides the cells of the image
    session: Callable[..., CellOrderSession] = CellOrderSession

    def __init__(
        self,
        iterations: int | None = None,
        order: str = "random",
        last_steps: int | None = None,
        annealing: str = "linear",
    ) -> None:
        if iterations is not None and (not is_integer(iterations) or iterations < 1):
            raise InputError("iterations", iterations, "must be a positive integer")
        if order not in ORDERS:
            raise InputError("order", order, did_you_mean(order, ORDERS))
        self.iterations, self.order = iterations, order
        self.annealing = None if last_steps is None else StepAnnealing(last_steps, annealing)
        published = iterations is None and order == "random" and last_steps is None
        self.exactness = Level.EXACT if published else Level.APPROXIMATE
        self.keeps = TOGETHER

    def check(self, target: AnyTarget) -> None:
        if target.grid is None or not target.any_order:
            raise InputError("accelerator", "masked", "needs a masked autoregressive image model (MAR)")

    def admit(self, requests: Sequence[Request], sampler: MARSampler, stopping: Stopping) -> None:
        lengths = {require_grid(request.layout, "masked").length for request in requests}
        if len(lengths) != 1:
            raise InputError("requests", sorted(lengths), "must have images of one size")
        if self.iterations is not None and self.iterations > min(lengths):
            rule = f"must be between 1 and {min(lengths)}, the cells of the image"
            raise InputError("iterations", self.iterations, rule)


class CellModelDrafter(ModelDrafter, CellOrderDrafter):
    """Drafts cells of an image with a smaller masked autoregressive model, each given those before it.

    The order of the cells is that of `CellOrderDrafter`. Each cell is a chain of its own, whose root predicts
    it. The target scores all of them in one forward pass, with one set of known cells for each, because its
    attention is bidirectional. Candidates after a rejected one are drafted again.

    The draft model draws with its own denoising head. If target and draft model have the same width, assign
    the target's head to it (`draft.diffloss = target.diffloss`); the chains then differ by their conditions
    alone.

    Args:
        model: the draft model behind the Target interface.
        num_draft_tokens: cells of a draft, 1 to 512.
        prefill: share of the cells, 0 to 1, that the target decides alone, one per forward pass, before the
            first draft; the two models agree least when few cells are known.
        order: see `CellOrderDrafter`.
        see_drafts: whether the target sees the candidates before each cell. With False the target predicts
            all cells given the known ones alone, as in the released code; approximate.
        last_noise: whether candidates have the noise of the last step. With False their chains end in the
            mean of that step, as in the released code; approximate.
        shared_guidance: whether the target uses the guidance scale of a draft's last cell for all its cells,
            as the released code does where the scale grows with the image; approximate.
        rollback: whether candidates drafted after a rejected one are discarded. With False the rejected one
            is replaced and the others are kept, as in the released code, so that the speed does not depend
            on acceptance; approximate.

    Raises:
        InputError: a value outside its range.
    """

    kind = DraftKind.IID
    session = CellModelSession

    def __init__(
        self,
        model: MARTarget,
        num_draft_tokens: int = 8,
        prefill: float = 0.05,
        order: str = "random",
        see_drafts: bool = True,
        last_noise: bool = True,
        shared_guidance: bool = False,
        rollback: bool = True,
    ) -> None:
        super().__init__(order=order)
        if not isinstance(rollback, bool):
            raise InputError("rollback", rollback, "must be True or False")
        self.model, self.num_draft_tokens = model, check_draft_tokens(num_draft_tokens)
        require_number("prefill", prefill, 0.0, 1.0, "must be between 0 (none) and 1 (all cells)")
        self.prefill = prefill
        self.see_drafts, self.last_noise = see_drafts, last_noise
        self.shared_guidance, self.rollback = shared_guidance, rollback
        self.keeps = ONE_BY_ONE if order == "random" else f"{ONE_BY_ONE}, in {order} order"
        exact = see_drafts and last_noise and rollback and not shared_guidance
        self.exactness = Level.EXACT if exact else Level.APPROXIMATE

    @property
    def reference(self) -> str:
        return f"masked:iterations={self.model.grid.cells}:order={self.order}"

    def check(self, target: AnyTarget) -> None:
        super().check(target)
        ours, theirs = ((each.vector_size, each.grid) for each in (self.model, target))
        if ours != theirs:
            rule = f"must draw vectors of size {theirs[0]} for {theirs[1]}, as the target does"
            raise InputError("drafter", f"vectors of size {ours[0]} for {ours[1]}", rule)
