"""Staircase of ZipAR (2412.04062): rows of an image are decoded side by side, each behind the one above.

The node of a cell's predecessor in raster order predicts the cell. It attends to the places that the
staircase has reached by then. It misses the others, so that every staircase except raster order is lossy.
The places that a cell sees depend on its own place alone. Therefore each row may also hold a window of Jacobi
drafts, which gives the same tokens in fewer forward passes.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import pad

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.distributions import Categorical, PointMass, Scores
from mmspec.core.draft import Block, Draft, DraftKind
from mmspec.core.image_grid import FREE, Grammar, ImageGrid, require_grid
from mmspec.core.indexing import take
from mmspec.core.interfaces import AnyTarget, DraftSession, Request, TargetOutput
from mmspec.core.promise import Level
from mmspec.core.sampling import Sampler, processor_names
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.core.verdict import Fill
from mmspec.errors import InputError
from mmspec.validation import is_integer

__all__ = ["StaircaseDrafter"]

BEYOND = 2**40  # a step after the end of any image
POSITIVE = "must be a positive integer"


class RowsAtWork(NamedTuple):
    """Rows of each image that take part in a forward pass, from the top.

    Attributes:
        row: [B, A] their numbers.
        done: [B, A] decided cells of each.
        above: [B, A] decided cells of the row above each, as far as its first prediction may rely on them.
        limit: [B, A] column below which cells of each may be decided now.
        is_used: [B, A] False where an image has fewer such rows than another.
    """

    row: Tensor
    done: Tensor
    above: Tensor
    limit: Tensor
    is_used: Tensor


@dataclass(frozen=True)
class Front:
    """Input of one forward pass: n nodes in each of the A rows at work. Place L means no place.

    Attributes:
        work: the rows.
        root: [B, A] place before the next cell of each row.
        is_known: [B, A] whether the token at the root is decided and may be fed; if not, another replaces it.
        places: [B, A, n] of the nodes.
        column: [B, A, n] of the cell after each node; L where there is no node.
        follows: [B, A, n] whether the cell after each node may be decided now.
        on_trial: [B, A] whether the row's first token is drawn now, and verified in the next forward pass.
    """

    work: RowsAtWork
    root: Tensor
    is_known: Tensor
    places: Tensor
    column: Tensor
    follows: Tensor
    on_trial: Tensor


class StaircaseSession(DraftSession):
    """Staircases of a batch of images: R rows in the largest, at most A of them in one forward pass.

    Attributes:
        fed: [B, L + 1] places whose keys are those of their current token; False at L.
        guesses: [B, L + 1] the target's latest choice for a place, not verified yet, or FREE.
        offered: [B, V] the distribution of a row's first token that is drawn but not verified yet.
        rounds: forward passes so far.
        front: input of the current forward pass.
    """

    front: Front

    def __init__(self, drafter: StaircaseDrafter, batch: PromptBatch) -> None:
        self.drafter, self.random, self.rounds = drafter, batch.random, 0
        device, vocabulary = batch.prefill.logits.device, batch.prefill.logits.shape[-1]
        self.grids = grids = grids_of(batch.requests)
        self.length, self.stride = max(grid.length for grid in grids), max(grid.stride for grid in grids)
        lags = [drafter.lag(grid.columns) for grid in grids]
        self.least_lag = min(lags)
        rows, columns = max(grid.rows for grid in grids), max(grid.columns for grid in grids)
        self.most_lanes = max(map(drafter.lanes, grids))
        self.rows, self.columns, stride, self.lag = torch.tensor(
            [(grid.rows, grid.columns, grid.stride, lag) for grid, lag in zip(grids, lags, strict=True)],
            device=device,
        ).T[:, :, None]
        row, column = torch.arange(rows, device=device), torch.arange(columns, device=device)
        self.step = torch.arange(drafter.nodes, device=device)
        self.order = torch.arange(self.length + 2, device=device)
        self.exists = row < self.rows
        # no syntax before a row's first cell, and the row above is not complete when it begins
        self.begins_early = (stride == self.columns) & (self.lag < self.columns)
        self.begin = row * stride  # [B, R] the place of each row's first cell
        is_cell = (column < self.columns)[:, None, :] & self.exists[:, :, None]
        self.cells = (self.begin[:, :, None] + column).where(is_cell, self.length)  # [B, R, C]
        place = self.order[:-1]
        above, behind = place // stride, place % stride
        # [B, L + 1] the step at which a place's keys become visible: syntax when a row begins
        self.seen_from = above * self.lag + torch.where(behind < self.columns, behind + 1, self.lag)
        self.fed = torch.zeros_like(self.seen_from, dtype=torch.bool)
        self.guesses = torch.full_like(self.seen_from, FREE)
        self.offered = torch.zeros(len(grids), vocabulary, dtype=torch.float32, device=device)

    def open(self, canvas: Canvas) -> Draft:
        """Write the syntax, which is known, and return the draft of the first token."""
        canvas.reserve(self.length + 1)
        forced = Grammar([grid.forced for grid in self.grids], canvas.device).forced
        places = torch.arange(forced.shape[1], device=canvas.device).expand_as(forced)
        canvas.decide(places, forced, forced != FREE)
        return super().open(canvas)

    def propose(self, canvas: Canvas) -> Draft:
        self.rounds += 1
        self.front = front = self._front(canvas)
        inside = front.places < self.length
        # slots after the places of this forward pass: one for a missing predecessor, one for padding
        absent = min(self.length, (1 + self._begun) * self.stride)
        is_there = front.is_known[:, :, None] | (self.step > 0)
        slots = front.places.where(is_there, absent).where(inside, absent + 1)
        tokens, valid, q = self._candidates(canvas, front)
        self.fed.scatter_(1, front.root.where(front.is_known, self.length), True)
        self.fed[:, self.length] = False
        visible = self._visible(front, slots, front.places.where(inside, 0), absent)
        begins = front.work.is_used & ~front.is_known
        standing = front.root.where(begins, 0).amax(-1, keepdim=True)  # at most one row begins
        depths = torch.cat([self.order[:absent].expand(len(standing), -1), standing, standing], 1)
        faulty = torch.zeros_like(begins[:, 0])
        completes = 2 * self.stride + self.drafter.window + max(len(grid.ending) for grid in self.grids)
        candidates = tokens, valid, self.drafter.kind, q, faulty
        return Block(*candidates, slots, depths, visible, front.root + 1, front.follows, completes)

    def _front(self, canvas: Canvas) -> Front:
        """Return the input of this forward pass."""
        work = self._march() if self.step.shape[0] == 1 else self._advance(canvas)
        place = self.begin.gather(1, work.row) + work.done - 1
        root = place.clamp_min(0).where(work.is_used, self.length)
        if self.drafter.adaptive:
            is_known = work.is_used & canvas.decided.gather(1, root)
        else:  # by its place, even where the row above is complete
            is_known = work.is_used & ((work.done > 0) | ~self.begins_early)
        column = work.done[:, :, None] + self.step
        inside = work.is_used[:, :, None] & (column <= self.columns[:, :, None])
        places = (root[:, :, None] + self.step).where(inside, self.length)
        follows = inside & (column < work.limit[:, :, None])
        on_trial = torch.zeros_like(is_known)
        if self.drafter.adaptive:
            is_tried = self.guesses.gather(1, places[:, :, 1]) != FREE
            on_trial = (work.done == 0) & ~is_tried & (work.above < self.columns) & work.is_used
            follows = follows & torch.stack([~on_trial, is_tried], -1)
        return Front(work, root, is_known, places, column.where(inside, self.length), follows, on_trial)

    @property
    def _begun(self) -> int:
        """Upper bound, computed on the host, of the rows below the first one that have begun."""
        return (1 + (self.rounds - 1) * self.drafter.window) // self.least_lag

    def _march(self) -> RowsAtWork:
        """Return the rows at work where each forward pass decides one cell of each of them."""
        counts = [1]
        for grid in self.grids:
            begins = range(0, grid.rows * (lag := self.drafter.lag(grid.columns)), lag)
            counts.append(sum(0 <= self.rounds - begin <= grid.columns for begin in begins))
        highest = (self.rounds - self.columns).clamp_min(0).add(self.lag - 1) // self.lag
        row = highest + torch.arange(max(counts), device=highest.device)
        done = self.rounds - row * self.lag
        is_used = (done >= 0) & (row < self.rows)
        row = row.clamp_max(self.begin.shape[1] - 1)
        columns, lag = self.columns.expand_as(row), self.lag.expand_as(row)
        return RowsAtWork(row, done.clamp_min(0), lag, columns, is_used)

    def _advance(self, canvas: Canvas) -> RowsAtWork:
        """Return the rows at work, given the decided cells.

        The cell in column j waits for min(j + k s, C) cells of the k-th row above it, for every k, and for
        the keys of these cells. The key of a row's newest cell is available only if that row is at work.
        """
        done = canvas.decided.gather(1, self.cells.flatten(1)).view_as(self.cells)
        done = (done & (self.cells < self.length)).sum(-1)  # [B, R]
        newest = (self.begin + done - 1).clamp(0, self.length)
        unfed = (done > 0) & ~self.fed.gather(1, newest)
        start = torch.arange(done.shape[1], device=done.device) * self.lag  # the step that a row begins at

        def limits(there: Tensor) -> Tensor:
            steps = (there + start).where(there < self.columns, BEYOND)
            least = pad(steps.cummin(-1).values[:, :-1], (1, 0), value=BEYOND)
            return torch.minimum(least - start + 1, self.columns)

        by_itself = (done < limits(done - unfed.long())) | ((done == self.columns) & unfed)
        with_those_above = by_itself | (done < limits(done))
        stuck = (unfed & ~with_those_above).long().cummax(-1).values.bool()
        at_work = (by_itself | (with_those_above & ~pad(stuck[:, :-1], (1, 0), value=False))) & self.exists
        limit = limits(torch.where(at_work, done, done - unfed.long()))
        row = at_work.sort(dim=-1, descending=True, stable=True).indices[
            :, : min(self.most_lanes, 1 + self._begun)
        ]
        above = self.lag.expand_as(row)
        if self.drafter.adaptive:
            above = done.gather(1, (row - 1).clamp_min(0))
        return RowsAtWork(row, done.gather(1, row), above, limit.gather(1, row), at_work.gather(1, row))

    def _candidates(self, canvas: Canvas, front: Front) -> tuple[Tensor, Tensor, Categorical | PointMass]:
        """Tokens [B, A, n] of the nodes, whether each is a candidate, and the distributions they are from."""
        # the newest token of the row above replaces a missing predecessor
        stand_in = self.begin.gather(1, (front.work.row - 1).clamp_min(0)) + front.work.above - 1
        tokens = canvas.tokens.gather(1, front.root.where(front.is_known, stand_in))[:, :, None]
        valid = pad(front.follows[:, :, :-1], (1, 0), value=True)
        if self.step.shape[0] > 1:
            guesses = self.guesses.gather(1, front.places.flatten(1)).view_as(front.places)
            tokens = torch.where((guesses == FREE) | (self.step == 0), tokens, guesses)
        if not self.drafter.adaptive:
            return tokens, valid, PointMass(tokens.flatten(0, 1)[:, 1:])
        valid[:, :, 1] = guesses[:, :, 1] != FREE
        q = self.offered[:, None, None].expand(-1, *valid[:, :, 1:].shape[1:], -1).flatten(0, 1)
        return tokens, valid, Categorical(q)

    def _visible(self, front: Front, slots: Tensor, here: Tensor, absent: int) -> Tensor:
        """[B, A * n, m] the slots that nodes at places `here` see: those fed before, and their own."""
        slot = self.order[: absent + 2]
        own, place = slots.flatten(1)[:, :, None], here.flatten(1)[:, :, None]
        seen = pad(self.fed[:, None, :absent], (0, 2)) & (slot < place)
        if self.step.shape[0] > 1:
            root = front.root[:, :, None].expand_as(here).flatten(1)[:, :, None]
            if self.drafter.window > 1:  # rows above may be further than without drafts
                reached = (front.work.row * self.lag + front.work.done)[:, :, None] + self.step
                seen &= pad(self.seen_from[:, None, :absent], (0, 2)) <= reached.flatten(1)[:, :, None]
            seen |= (slot > root) & (slot <= place)
        return seen | (slot == own)

    def observe(self, draft: Block, output: TargetOutput, scores: Scores, verdict: Fill) -> None:
        front = self.front
        rows, lanes, nodes = front.places.shape
        if nodes == 1:
            return
        columns = self.columns[:, :, None]
        accepted = verdict.is_draft.view(rows, lanes, nodes).sum(-1, keepdim=True)
        whole = front.follows | (front.column == columns)  # they saw everything
        kept = front.places.where((self.step > 0) & (self.step <= accepted) & whole, self.length)
        self.fed.scatter_(1, kept.flatten(1), True)
        self.fed[:, self.length] = False
        random, starts = self.random.repeat(rows * lanes), draft.starts.flatten()
        choice = scores.choose(draft.lanes, random, starts).view_as(front.places)
        if self.drafter.adaptive:
            tried = choice[:, :, 0].where(front.on_trial, FREE)
            self.guesses.fill_(FREE).scatter_(1, front.places[:, :, 1], tried)
            lane = front.on_trial.long().argmax(-1)
            self.offered = take(scores.p[:, 0].view(rows, lanes, -1), lane)
        else:
            after = (front.places + 1).where(front.column < columns, self.length)
            self.guesses.scatter_(1, after.flatten(1), choice.flatten(1))


class StaircaseDrafter(SessionDrafter):
    """Decodes cell (i, j) once (i - 1, j ... j + s - 1) are decoded (ZipAR, 2412.04062).

    An image of R x C cells takes C + (R - 1) s forward passes. s = C is raster order, whose output is that of
    plain decoding. Smaller s is lossy, without a bound: cells miss the right end of the rows above.

    Args:
        zipar_window: cells s by which a row is behind the row above, from 1 to the columns of the image; a
            third of the columns, as published (8 of LlamaGen's 24, 16 of Lumina-mGPT's 48), if None.
        adaptive: whether the first token of a row is predicted twice, one forward pass apart, and the token
            of the first prediction is verified against the second distribution (the paper's adaptive window,
            verified once). A rejected token delays its row by one forward pass. Needs s of 2 or more.
        window: places of each image row in a forward pass, 1 or more. Those beyond the first are Jacobi
            drafts, drawn with the target's own noise: the tokens are those of window 1, in fewer forward
            passes (as in PJD, 2606.05703, whose drafts are drawn without that noise).

    Raises:
        InputError: a window is out of range, or an adaptive staircase has drafts.
    """

    exactness = Level.LOSSY
    session = StaircaseSession

    def __init__(self, zipar_window: int | None = None, adaptive: bool = False, window: int = 1) -> None:
        if not isinstance(adaptive, bool):
            raise InputError("adaptive", adaptive, "must be True or False")
        if zipar_window is not None and (not is_integer(zipar_window) or zipar_window < 1 + adaptive):
            rule = "must be an integer of at least 2 with adaptive=True" if adaptive else POSITIVE
            raise InputError("zipar_window", zipar_window, rule)
        if not is_integer(window) or window < 1 or (adaptive and window > 1):
            rule = "must be 1 with adaptive=True, which has no drafts" if adaptive else POSITIVE
            raise InputError("window", window, rule)
        self.zipar_window, self.adaptive, self.window = zipar_window, adaptive, window
        self.kind = DraftKind.IID if adaptive else DraftKind.COUPLED if window > 1 else DraftKind.POINT
        self.nodes = self.max_nodes = 1 + adaptive if window == 1 else window

    def lag(self, columns: int) -> int:
        """Return s, the number of cells by which a row is behind the one above, for that many columns."""
        if self.zipar_window is None:
            return max(columns // 3, 1 + self.adaptive)
        return self.zipar_window

    def lanes(self, grid: ImageGrid) -> int:
        """Return the most rows of an image in one forward pass; the last token of one of them is only fed."""
        return min(grid.rows, 1 + -(-grid.columns // self.lag(grid.columns)))

    def fit(self, target: AnyTarget) -> StaircaseDrafter:
        self.check(target)
        fitted = copy.copy(self)
        fitted.max_nodes = self.nodes * self.lanes(require_grid(target.grid, "zipar"))
        return fitted

    def check(self, target: AnyTarget) -> None:
        grid = target.grid
        if grid is None:
            raise InputError("accelerator", "zipar", "needs a model that draws images in rows of tokens")
        rule = f"must be from 1 to {grid.columns}, the columns of the image"
        if self.lag(grid.columns) > grid.columns:
            raise InputError("zipar_window", self.zipar_window, rule)
        if self.window > grid.columns:
            raise InputError("window", self.window, rule)

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        if sampler.processors:
            rule = "cannot be used with zipar, which does not decode cells from left to right"
            raise InputError("logits_processor", processor_names(sampler), rule)
        shortest, asked = min(grid.length for grid in grids_of(requests)), stopping.max_new_tokens
        if asked > shortest:
            raise InputError("max_new_tokens", asked, f"must be at most {shortest}, the tokens of an image")


def grids_of(requests: Sequence[Request]) -> list[ImageGrid]:
    """Return the grids of the requests; raises InputError for a request without one."""
    return [require_grid(request.layout, "zipar") for request in requests]
