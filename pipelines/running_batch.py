"""RunningBatch: requests that enter and leave a batch between rounds, each with settings of its own.

A request is read, and decodes its first round, alone; then its rows stand behind those of the others. What it
gives is what it gives alone: rows are computed independently, and random numbers belong to a request's seed.
There is no scheduler: who comes when there is room enters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import TYPE_CHECKING, Self

import torch

from mmspec.accelerators import make
from mmspec.core.canvas import Canvas, RowOutput
from mmspec.core.interfaces import TargetState
from mmspec.core.loop import Batch, begin
from mmspec.core.statistics import DecodingStats, merge_stats
from mmspec.errors import InputError, NoRoomError, NumericalError
from mmspec.pipelines.outputs import CallOutput
from mmspec.plugins import METHODS, Method
from mmspec.targets import CausalTarget
from mmspec.validation import is_integer

if TYPE_CHECKING:
    from mmspec.pipelines.base import MMSpecPipeline

__all__ = ["RowUpdate", "RunningBatch"]

MOST_ROWS = 1024
STAYS = "its rows stay together until all have ended"


@dataclass(frozen=True)
class RowUpdate:
    """Update of one request after a round.

    Attributes:
        handle: of the request.
        tokens: new tokens of each of its rows.
        output: the whole output, as a call of the pipeline gives it, when the request has ended; its rows are
            free then.
        error: the error in which a row of it ended; the output holds what there is.
    """

    handle: int
    tokens: list[RowOutput]
    output: CallOutput | None = None
    error: NumericalError | None = None


@dataclass(eq=False)
class Running:
    """A request in the batch."""

    handle: int
    make_output: Callable[[Canvas], CallOutput]  # of the canvas of its rows
    rows: int
    text_before: list[int]  # of its first row's `Request`
    fresh: list[RowOutput]  # new tokens of each row that have not been reported

    def take(self, tokens: Sequence[RowOutput]) -> None:
        """Add new tokens of its rows."""
        for fresh, new in zip(self.fresh, tokens, strict=True):
            fresh.extend(new)


class RunningBatch:
    """A batch that requests enter and leave between rounds. Made by `pipe.running_batch`; a context manager.

    Args:
        pipe: the pipeline, which is busy until `close`.
        rows: most rows that are decoded together; an image is one, with guidance too.

    Raises:
        InputError: rows is no positive integer, or rows of this model or accelerator stay together until all
            have ended.
        PipelineBusyError: the pipeline is in use.
    """

    def __init__(self, pipe: MMSpecPipeline, rows: int) -> None:
        if not is_integer(rows) or not 1 <= rows <= MOST_ROWS:
            raise InputError("rows", rows, f"an integer from 1 to {MOST_ROWS}")
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
        """Counts and times since the batch began; rows of requests that are gone count as one."""
        return self._past if self._batch is None else merge_stats([self._past, self._batch.canvas.stats])

    @property
    def free(self) -> int:
        """Number of rows that requests can take."""
        return self.rows - sum(each.rows for each in self._running)

    @property
    def handles(self) -> list[int]:
        """Requests in the batch, in the order in which they entered."""
        return [each.handle for each in self._running]

    def prompt_tokens(self, handle: int) -> int:
        """Number of tokens of a request's first prompt, visual ones included; 0 if it is not in the batch."""
        for running, rows in self._placed():
            if running.handle == handle and self._batch is not None:
                return self._batch.canvas.prompt_lengths[rows[0]]
        return 0

    def text_before(self, handle: int) -> list[int]:
        """Last tokens of a request's first prompt, if its answer goes on with their text; else none."""
        return next((each.text_before for each in self._running if each.handle == handle), [])

    @torch.inference_mode()
    def enter(self, prompt: object, **arguments: object) -> int:
        """Read a request's prompt, and let it take part from the next round on.

        Args:
            prompt: of one request.
            arguments: as of a call of the pipeline, without those that look at a whole call (streamer,
                callbacks, batch_size).

        Returns:
            The handle that updates name.

        Raises:
            InputError: as a call of the pipeline would; nothing has changed then.
            NoRoomError: too few rows are free, or those in the batch are decoded with guidance and this one
                without, or the reverse.
        """
        call, make_output = self.pipe._prepare_request(prompt, arguments)
        count = len(call.requests)
        if count > self.rows:
            raise InputError("rows", count, f"at most {self.rows}, the rows of the running batch")
        if count > self.free:
            raise NoRoomError(f"{count} rows are wanted, {self.free} are free; try again when some have left")
        if self._batch is not None and self._batch.sampler.is_guided != call.sampler.is_guided:
            raise NoRoomError("requests with and without guidance are not decoded together; wait for others")
        before = call.requests[0].text_before
        running = Running(self._handles, make_output, count, before, [[] for _ in range(count)])
        accelerator = self.pipe.accelerator
        if call.accelerator.name != accelerator.name and call.canvas.stopping[0].lockstep is None:
            allowed = "'none': hooks of the model do something else to several tokens than to one alone"
            raise InputError("accelerator", accelerator.name, allowed)
        where = call.sampler, call.requests, call.canvas, call.random
        batch, prompts = begin(self.pipe.target, accelerator.decoder, *where)
        running.take(prompts.emission.tokens)
        if not call.canvas.finished:  # the first round alone: sessions have the shapes of rounds then
            try:
                batch.decode_round()
                running.take(batch.read_round().tokens)
                batch.state.tighten(call.canvas.length_bounds)
            except BaseException:
                batch.state.close()
                raise
        self._handles += 1
        self._batch = batch if self._batch is None else self._batch.joined(batch)
        self._running.append(running)
        return running.handle

    @torch.inference_mode()
    def step(self) -> list[RowUpdate]:
        """Decode one round, and return what it brought; the rows of requests that have ended are free then.

        Raises:
            BaseException: what the model raised; the batch is closed then, and its requests are lost.
        """
        if self._batch is None:
            return []
        canvas = self._batch.canvas
        if any(canvas.finish_reasons[row] is None for row in range(len(canvas.ids))):
            try:
                self._batch.decode_round()
                tokens = self._batch.read_round().tokens
                self._batch.state.tighten(canvas.length_bounds)
            except BaseException:
                self.close()
                raise
            for running, rows in self._placed():
                running.take([tokens[row] for row in rows])
        updates, ended = [], []
        for running, rows in self._placed():
            fresh, running.fresh = running.fresh, [[] for _ in rows]
            if any(canvas.finish_reasons[row] is None for row in rows):
                updates += [RowUpdate(running.handle, fresh)] if any(map(len, fresh)) else []
                continue
            ended.append(running)
            own = canvas.part(rows)
            own.stats = own.stats.of_rows_alone()
            error = next((error for error in own.errors if error is not None), None)
            updates.append(RowUpdate(running.handle, fresh, running.make_output(own), error))
        self._remove(ended)
        return updates

    def cancel(self, handle: int) -> None:
        """Take a request out; its rows are free at once.

        Raises:
            InputError: there is no such request in the batch.
        """
        found = [each for each in self._running if each.handle == handle]
        if not found:
            raise InputError("handle", handle, f"one of {self.handles}")
        self._remove(found)

    def close(self) -> None:
        """End all requests, and free the pipeline."""
        self._remove(list(self._running))
        self._held.close()

    def _placed(self) -> Iterator[tuple[Running, range]]:
        """Each request with its rows in the batch."""
        first = 0
        for running in self._running:
            yield running, range(first, first + running.rows)
            first += running.rows

    @torch.inference_mode()
    def _remove(self, gone: Sequence[Running]) -> None:
        if not gone or self._batch is None:
            return
        stay = [row for running, rows in self._placed() if running not in gone for row in rows]
        self._running = [running for running in self._running if running not in gone]
        canvas = self._batch.canvas
        if stay:
            left = [row for row in range(len(canvas.ids)) if row not in stay]
            self._add_up(canvas.stats.part(left).of_rows_alone())
            self._batch = self._batch.part(stay)
        else:
            self._add_up(canvas.stats)
            self._batch.state.close()
            self._batch = None

    def _add_up(self, stats: DecodingStats) -> None:
        """Add the counts of rows that are gone, as if they were one."""
        self._past = merge_stats([self._past, stats]).as_one_row()


def may_move(method: Method) -> bool:
    """Whether rows may enter and leave a method's sessions, as far as that is known without a model."""
    if method.head is not None:
        return bool(method.head.load("drafter").rows_move)
    return method.needs is None and make(method).drafter.rows_move


def check_rows_move(pipe: MMSpecPipeline) -> None:
    """Raise InputError if rows of a pipeline stay together until all have ended."""
    accelerator, target = pipe.accelerator, pipe.target
    if not isinstance(target, CausalTarget) or target.by_blocks:
        raise InputError("model", type(pipe.model).__name__, f"a causal model: {STAYS}")
    if not accelerator.drafter.rows_move:
        movable = ", ".join(name for name, method in METHODS.items() if may_move(method))
        raise InputError("accelerator", accelerator.name, f"{STAYS}; others can: {movable}")
    if accelerator.length == "cost":
        raise InputError(
            "length", "cost", f"'auto', 'fixed' or 'confidence': {STAYS}, for its sizes are of a batch"
        )
    if target.steps is not None:
        allowed = "a pipeline that is not compiled: steps are for one batch size"
        raise InputError("pipe.compile", True, allowed)
