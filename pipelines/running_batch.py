"""RunningBatch (continuous batching): requests enter and leave between rounds, each with its own settings.

The prefill and first round of a request run alone; then its rows are appended to the batch. When it leaves,
the last rows of the batch replace its rows. The output of a request is the same as in a call of its own: rows
are computed independently, and random numbers depend on the seed of the request. There is no scheduler: a
request enters if there is room.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from mmspec.core.canvas import Canvas, RowOutput
from mmspec.core.interfaces import TargetState
from mmspec.core.loop import Batch, begin
from mmspec.core.statistics import DecodingStats, merge_stats
from mmspec.errors import InputError, NoRoomError, NumericalError
from mmspec.pipelines.outputs import CallOutput
from mmspec.plugins import METHODS
from mmspec.targets import CausalTarget
from mmspec.validation import is_integer

if TYPE_CHECKING:
    from mmspec.pipelines.base import MMSpecPipeline

__all__ = ["RowUpdate", "RunningBatch"]

MOST_ROWS = 1024
STAYS = "in a running batch; rows of others must stay together until all have ended"


@dataclass(frozen=True)
class RowUpdate:
    """Update of one request after a round.

    Attributes:
        handle: handle of the request.
        tokens: new tokens of each of its rows.
        output: the output of the finished request, as returned by a call of the pipeline; None before. The
            rows of a finished request are free.
        error: the error of a failed row; the output has the tokens decoded before.
    """

    handle: int
    tokens: list[RowOutput]
    output: CallOutput | None = None
    error: NumericalError | None = None


@dataclass(eq=False)
class Running:
    """A request in the batch."""

    handle: int
    make_output: Callable[[Canvas], CallOutput]  # from the canvas of its rows
    rows: list[int]  # in the batch, in increasing order
    text_before: list[int]  # of the first row's `Request`
    fresh: list[RowOutput]  # new tokens of each row that have not been reported
    cached_tokens: int = 0  # of its prompts, which the prefix cache supplied

    def take(self, tokens: Sequence[RowOutput]) -> None:
        """Add new tokens of its rows."""
        for fresh, new in zip(self.fresh, tokens, strict=True):
            fresh.extend(new)


class RunningBatch:
    """Running batch (continuous batching): a batch that requests enter and leave between rounds.

    Open it with `pipe.running_batch` in a `with` block.

    Args:
        pipe: the pipeline, which is busy until `close`.
        rows: maximum number of rows that are decoded together. An image is one row, also with guidance.

    Raises:
        InputError: `rows` is out of range, or the model or accelerator cannot change rows during decoding.
        PipelineBusyError: another call is running.
    """

    def __init__(self, pipe: MMSpecPipeline, rows: int) -> None:
        if not is_integer(rows) or not 1 <= rows <= MOST_ROWS:
            raise InputError("rows", rows, f"must be an integer from 1 to {MOST_ROWS}")
        check_rows_move(pipe)
        self.pipe, self.rows = pipe, rows
        self._held = ExitStack()
        self._held.enter_context(pipe._busy())
        self._past = DecodingStats(pipe.accelerator.name, pipe.accelerator.exactness)
        self._batch: Batch[TargetState] | None = None
        self._running: list[Running] = []
        self._handles = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> DecodingStats:
        """Statistics since the batch was opened; the rows of finished requests are merged into one."""
        return self._past if self._batch is None else merge_stats([self._past, self._batch.canvas.stats])

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.rows - sum(len(each.rows) for each in self._running)

    @property
    def handles(self) -> list[int]:
        """Handles of the requests in the batch, in the order in which they entered."""
        return [each.handle for each in self._running]

    def prompt_tokens(self, handle: int) -> int:
        """Return the length of a request's first prompt, visual tokens included; 0 if not in the batch."""
        for running in self._running:
            if running.handle == handle and self._batch is not None:
                return self._batch.canvas.prompt_lengths[running.rows[0]]
        return 0

    def text_before(self, handle: int) -> list[int]:
        """Return the last tokens of a request's first prompt if the output continues their text, else []."""
        return next((each.text_before for each in self._running if each.handle == handle), [])

    @torch.inference_mode()
    def enter(self, prompt: object, **arguments: object) -> int:
        """Add a request to the batch: run its prefill, and decode it from the next round on.

        Args:
            prompt: prompt or prompts of the request, as in a call of the pipeline.
            arguments: arguments of a call of the pipeline, without streamer, callbacks and batch_size.

        Returns:
            The handle of the request, which its updates carry.

        Raises:
            InputError: an argument cannot be used.
            NoRoomError: too few rows are free, or the rows in the batch use guidance and the request does
                not, or the reverse.
            torch.OutOfMemoryError: the device has too little memory for the request.
            BaseException: an error of the model. The batch is unchanged after every error.
        """
        call, make_output = self.pipe._prepare_request(prompt, arguments)
        count = len(call.requests)
        if count > self.rows:
            raise InputError("rows", count, f"must be at most {self.rows}, the rows of the running batch")
        if count > self.free:
            raise NoRoomError(f"{self.free} rows are free, {count} are needed; enter the request again later")
        if self._batch is not None and self._batch.sampler.is_guided != call.sampler.is_guided:
            raise NoRoomError(
                "requests with and without guidance cannot be decoded together; enter the request again later"
            )
        before = call.requests[0].text_before
        first = self.rows - self.free
        rows = list(range(first, first + count))
        running = Running(self._handles, make_output, rows, before, [[] for _ in rows])
        accelerator = self.pipe.accelerator
        if call.accelerator.name != accelerator.name and call.canvas.stopping[0].lockstep is None:
            rule = "must be 'none'; the hooks of the model treat several tokens differently from a single one"
            raise InputError("accelerator", accelerator.name, rule)
        where = call.sampler, call.requests, call.canvas, call.random
        batch, prompts = begin(self.pipe.target, accelerator.decoder, *where)
        running.cached_tokens = call.canvas.stats.cached_prompt_tokens
        running.take(prompts.emission.tokens)
        try:
            if not call.canvas.finished:  # the first round runs alone, after which sessions can be joined
                batch.decode_round()
                running.take(batch.read_round().tokens)
                batch.tighten()
            self._batch = batch if self._batch is None else self._batch.joined(batch)
        except BaseException:
            batch.state.close()
            raise
        self._handles += 1
        self._running.append(running)
        return running.handle

    @torch.inference_mode()
    def step(self) -> list[RowUpdate]:
        """Decode one round and return its updates; the rows of finished requests become free.

        Raises:
            BaseException: an error of the model; the batch is closed and its requests are lost.
        """
        if self._batch is None:
            return []
        canvas = self._batch.canvas
        if any(canvas.finish_reasons[row] is None for row in range(len(canvas.ids))):
            try:
                self._batch.decode_round()
                tokens = self._batch.read_round().tokens
                self._batch.tighten()
            except BaseException:
                self.close()
                raise
            for running in self._running:
                running.take([tokens[row] for row in running.rows])
        updates, ended = [], []
        for running in self._running:
            fresh, running.fresh = running.fresh, [[] for _ in running.rows]
            if any(canvas.finish_reasons[row] is None for row in running.rows):
                updates += [RowUpdate(running.handle, fresh)] if any(map(len, fresh)) else []
                continue
            ended.append(running)
            own = canvas.part(running.rows)
            own.stats = own.stats.of_rows_alone()
            own.stats.cached_prompt_tokens = running.cached_tokens
            error = next((error for error in own.errors if error is not None), None)
            updates.append(RowUpdate(running.handle, fresh, running.make_output(own), error))
        left = {row for running in ended for row in running.rows}.intersection(canvas.without_errors)
        self.pipe.target.remember(self._batch.state, canvas.outputs(), sorted(left))
        self._remove(ended)
        return updates

    def cancel(self, handle: int) -> None:
        """Cancel a request; its rows are free at once.

        Raises:
            InputError: the batch has no request with this handle.
        """
        found = [each for each in self._running if each.handle == handle]
        if not found:
            known = self.handles or "there is none"
            raise InputError("handle", handle, f"must be that of a request in the batch: {known}")
        self._remove(found)

    def close(self) -> None:
        """Cancel all requests and release the pipeline."""
        self._remove(list(self._running))
        self._held.close()

    @torch.inference_mode()
    def _remove(self, gone: Sequence[Running]) -> None:
        if not gone or self._batch is None:
            return
        left = [row for running in gone for row in running.rows]
        self._running = [running for running in self._running if running not in gone]
        canvas = self._batch.canvas
        if not self._running:
            self._add_up(canvas.stats)
            self._batch.state.close()
            self._batch = None
            return
        self._add_up(canvas.stats.part(left).of_rows_alone())
        stay = fill_holes(len(canvas.ids), left)
        for running in self._running:
            places = [place for place, row in enumerate(stay) if row in running.rows]
            for place, row in zip(places, running.rows, strict=True):  # callbacks get its rows in their order
                stay[place] = row
            running.rows = places
        self._batch = self._batch.part(stay)

    def _add_up(self, stats: DecodingStats) -> None:
        """Add the statistics of removed rows, merged into one row."""
        self._past = merge_stats([self._past, stats]).as_one_row()


def fill_holes(count: int, gone: Collection[int]) -> list[int]:
    """Return the rows of a batch that stay, in an order in which the last ones fill the holes."""
    moved = [row for row in range(count - len(gone), count) if row not in gone]
    return [moved.pop() if row in gone else row for row in range(count - len(gone))]


def check_rows_move(pipe: MMSpecPipeline) -> None:
    """Raise InputError if the rows of a pipeline cannot change during decoding."""
    accelerator, target = pipe.accelerator, pipe.target
    if not isinstance(target, CausalTarget) or target.by_blocks:
        raise InputError("model", type(pipe.model).__name__, f"must be a causal model {STAYS}")
    if not accelerator.drafter.rows_move:
        movable = ", ".join(name for name, method in METHODS.items() if method.drafter_class.rows_move)
        raise InputError("accelerator", accelerator.name, f"must be one of {movable} {STAYS}")
    if accelerator.length == "cost":
        rule = "must be 'auto', 'fixed' or 'confidence'; 'cost' chooses draft lengths for a fixed batch"
        raise InputError("length", "cost", rule)
    if target.steps is not None:
        rule = "have a fixed batch size, which a running batch changes; load the model without `compile`"
        raise InputError("compiled steps", type(pipe.model).__name__, rule)
