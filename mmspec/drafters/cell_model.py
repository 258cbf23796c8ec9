"""Draft model of cells in any order: a smaller masked model draws one after another (CSpD, 2411.11925)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.denoising import Denoising
from mmspec.decoding.draft import Cells, Draft, DraftKind, Progress
from mmspec.decoding.image_grid import ImageGrid
from mmspec.decoding.interfaces import DraftSession, PromptOutput, Request, Target, list_prompts
from mmspec.decoding.random_stream import Purpose, RandomStream
from mmspec.drafters.cell_orders import ONE_BY_ONE, CellOrder, CellOrderSession
from mmspec.errors import InputError
from mmspec.targets.mar import MARTarget
from mmspec.validation import check_draft_tokens, require_number

__all__ = ["CellModelDrafter"]


class CellModelDrafter(CellOrder):
    """Drafts cells of an image with a smaller masked autoregressive model, each behind those before it.

    The order of the cells is that of `CellOrderDrafter`. Each cell is a chain of its own, whose root predicts
    it: the target is asked for all of them in one forward, with one state of masks for each, because its
    attention goes both ways. Candidates behind a refused one are drafted anew.

    The draft model draws with its own head; give it the target's (`draft.diffloss = target.diffloss`) where
    both have one width, and the chains differ by their conditions alone.

    Args:
        model: the draft model behind the Target interface.
        num_draft_tokens: cells of a draft.
        prefill: share of the cells that the target decides alone, one in each forward, before any is drafted:
            two models agree least where hardly anything is known.
        order: "random" or "checkerboard", as of `CellOrderDrafter`.
        see_drafts: whether the target sees the candidates before each cell. False asks for all cells given
            the known ones alone, as the released code does; lossy.
        last_noise: whether candidates have the noise of the last step. False ends their chains in its mean,
            as the released code does; lossy.
        shared_guidance: whether the target takes the guidance scale of the last cell of a draft for all of
            them, as the released code does where the scale grows with the image; lossy.

    Raises:
        InputError: a value outside its range.
    """

    kind = DraftKind.IID

    def __init__(
        self,
        model: MARTarget,
        num_draft_tokens: int = 8,
        prefill: float = 0.05,
        order: str = "random",
        see_drafts: bool = True,
        last_noise: bool = True,
        shared_guidance: bool = False,
    ) -> None:
        super().__init__(order=order)
        self.model, self.num_draft_tokens = model, check_draft_tokens(num_draft_tokens)
        require_number("prefill", prefill, 0.0, 1.0, "0 (none) to 1 (all cells)")
        self.prefill = prefill
        self.see_drafts, self.last_noise, self.shared_guidance = see_drafts, last_noise, shared_guidance
        self.keeps = ONE_BY_ONE if order == "random" else f"{ONE_BY_ONE}, in {order} order"
        self.exactness = "exact" if see_drafts and last_noise and not shared_guidance else "approximate"

    def check(self, target: Target[Any]) -> None:
        super().check(target)
        ours, theirs = ((each.vector_size, each.grid) for each in (self.model, target))
        if ours != theirs:
            allowed = f"a model of vectors of size {theirs[0]} for {theirs[1]}, as the target's"
            raise InputError("drafter", f"vectors of size {ours[0]} for {ours[1]}", allowed)

    def to(self, *args: Any, **kwargs: Any) -> None:
        self.model.model.to(*args, **kwargs)
        self.model = MARTarget(self.model.model)

    def compile(self) -> None:
        if self.model.steps is None:
            self.model.compile()

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Any, random: RandomStream
    ) -> DraftSession:
        grids = [request.grid for request in requests if request.grid is not None]
        return CellModelSession(self, grids, requests, sampler, random)


class CellModelSession(CellOrderSession):
    """Draft model of a batch of images: it knows what the canvas has, and what it drafted itself.

    A cell is drafted with noise of its own place. One that a round left open meets the same candidate again,
    and one that was given up has noise that nothing was decided by.
    """

    def __init__(
        self,
        drafter: CellModelDrafter,
        grids: Sequence[ImageGrid],
        requests: Sequence[Request],
        sampler: Any,
        random: RandomStream,
    ) -> None:
        super().__init__(drafter, grids, drafter.model.device, random)
        self.drafter, self.random = drafter, random
        self.sampler = sampler.of_model(drafter.model)
        self.state, _ = drafter.model.prefill(list_prompts(requests, sampler), self.cells)
        self.alone = math.ceil(drafter.prefill * self.cells)
        self.lanes = torch.arange(drafter.num_draft_tokens, device=drafter.model.device)

    def propose(self, canvas: Canvas) -> Draft:
        known = canvas.decided[:, : self.cells]
        is_known = known.gather(1, self.order)
        self.decided = known.sum(1)  # [B]: images differ by what was refused
        cells = self.order.gather(1, is_known.long().argsort(dim=1, stable=True))  # those that are open first
        self.forwards += 1
        if self.forwards <= self.alone:
            return self._cells(cells[:, :1], canvas, self._progress(self.lanes[:1]))
        return self._draft(cells[:, : self.drafter.num_draft_tokens], canvas)

    def _draft(self, cells: Tensor, canvas: Canvas) -> Cells:
        """Draw a candidate for each cell [B, L], behind those before it."""
        rows, lanes = cells.shape
        place = torch.arange(self.cells, device=cells.device).expand(rows, -1)
        known = canvas.decided[:, : self.cells]
        self.state.known.zero_()
        self.state.write(place.where(known, self.cells), canvas.tokens[:, : self.cells])
        visible, tokens, finite, parts = list[Tensor](), list[Tensor](), list[Tensor](), list[Denoising]()
        seen = known
        for lane in range(lanes):
            visible.append(seen)
            token, predicted = self._candidate(cells[:, lane], lane, canvas)
            tokens.append(token)
            finite.append(predicted.is_finite() & token.isfinite().all(-1))
            parts.append(predicted)
            self.state.write(cells[:, lane : lane + 1], token[:, None])
            seen = seen | (place == cells[:, lane : lane + 1])
        q = Denoising.stack(parts).flat()
        candidates, usable = torch.stack(tokens, 1).flatten(0, 1), torch.stack(finite, 1)
        ahead = self.lanes[:lanes]
        is_open = ahead < self.cells - self.decided[:, None]
        drafted = is_open & usable.long().cumprod(1).bool()
        chains = Draft.chain(
            torch.stack([torch.zeros_like(candidates), candidates], 1),
            self.drafter.kind,
            Denoising.stack([q, q]),  # the root's is never asked for
            valid=torch.stack([torch.ones_like(drafted), drafted], -1).flatten(0, 1),
            faulty=(is_open & ~usable).flatten(),
        )
        views = torch.stack(visible, 1).repeat_interleave(2, 1) if self.drafter.see_drafts else known[:, None]
        return Cells.of(
            chains,
            slots=cells.reshape(-1, 1).repeat(1, 2),
            depths=place,
            starts=cells.reshape(-1),
            visible=views,
            follows=torch.stack([is_open, torch.zeros_like(is_open)], -1).flatten(0, 1),
            completes=self.cells,
            progress=self._progress(ahead.clamp_min(lanes - 1) if self.drafter.shared_guidance else ahead),
            ordered=True,
        )

    def _progress(self, ahead: Tensor) -> Progress:
        """Progress of chains that stand behind so many cells of the draft, [L] numbers."""
        before = (self.decided[:, None] + ahead).reshape(-1, 1, 1)
        return Progress(self.forwards - 1, self.cells, before, before + 1)

    def _candidate(self, cell: Tensor, lane: int, canvas: Canvas) -> tuple[Tensor, Denoising]:
        """Draw a vector [B, d] for one cell [B] of each image, with the chains that drew it."""
        self.passes += 1
        one = self._cells(cell[:, None], canvas, self._progress(self.lanes[lane : lane + 1]))
        conditions = self.drafter.model.score(self.state, one).logits
        predicted: Denoising = self.sampler(conditions, one, canvas.ids, cell)
        token, q = predicted.at(torch.zeros_like(cell)).candidate(self.random, cell, Purpose.DRAFT)
        if self.drafter.last_noise or q.drawn is None:
            return token, q
        mean, _ = q.process.transition(q.drawn[:, -2], q.process.steps - 1)
        return mean, q
