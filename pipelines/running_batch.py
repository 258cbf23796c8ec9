"""RunningBatch (continuous batching): requests enter and leave between rounds, each with its own settings.

The prefill of a request runs alone; then its rows are appended to the batch. With chunked prefill, each step
prefills some tokens of the prompts that wait, in the order in which their requests entered, and then
decodes a round; short prompts that wait together are prefilled in one forward pass. When a request leaves,
the last rows of the batch replace its rows. In a compiled pipeline on a GPU the number of rows is one of few
sizes, so that rounds are replayed from CUDA graphs: a request takes the slots of finished rows.

The output of a request is the same as in a call of its own: rows are computed independently, and random
numbers depend on the seed of the request. There is no scheduler: a request enters if there is room.

Rounds that are replayed from graphs run ahead: a GPU computes the next one while the host reads this one.
Before rows change, the host reads all rounds, so that it waits a second time in a round in which a request
ends or enters. The rows that have ended compute that further round for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field, replace
from itertools import accumulate, pairwise
from math import inf
from typing import TYPE_CHECKING, NamedTuple, Self, TypeAlias, cast

import torch

from mmspec.accelerator import Call
from mmspec.core.canvas import Canvas, RowOutput
from mmspec.core.chunked_prefill import ChunkedPrefill, finish
from mmspec.core.graphs import rows_of_graph
from mmspec.core.interfaces import Request, TargetState
from mmspec.core.logprobs import TokenLogprob
from mmspec.core.loop import Batch, begin, prefill_requests
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import AnySampler, RowSettings, Sampler
from mmspec.core.statistics import DecodingStats, merge_stats
from mmspec.errors import InputError, NoRoomError
from mmspec.open_types import Keywords
from mmspec.pipelines.outputs import CallOutput
from mmspec.plugins import METHODS
from mmspec.targets import CausalTarget
from mmspec.trees.pacing import PacedDrafter
from mmspec.validation import is_integer

if TYPE_CHECKING:
    from mmspec.pipelines.base import MMSpecPipeline
    from mmspec.pipelines.image_generation import ImageCall

__all__ = ["PreparedRequest", "RowUpdate", "RunningBatch", "new_logprobs", "prepare_request"]

MOST_ROWS = 1024
CAPTURED_PLACES = 2048
USUAL_TOP_K = 50  # of transformers' generation configs
ROUNDS_TO_CAPTURE = 3  # one without a graph, one that is captured, and a replay
LEAST_SHARE = 2  # slots are given up if fewer of them are left than this, times the rows that run
STAYS = "in a running batch; rows of others must stay together until all have ended"
#: A call, and the function from the canvas of its rows to its output.
PreparedRequest: TypeAlias = tuple[Call, Callable[[Canvas], CallOutput]]


@torch.inference_mode()
def prepare_request(pipe: MMSpecPipeline, prompt: object, arguments: Keywords) -> PreparedRequest:
    """Prepare a request for a running batch of a pipeline, and encode its images, in any thread.

    The batch decodes rounds meanwhile. The arguments are those of `RunningBatch.enter`.

    Raises:
        InputError: an argument cannot be used.
    """
    call, make_output = pipe._prepare_request(prompt, arguments)
    reader = pipe.accelerator.drafter.reader
    for request in call.requests:
        for inputs in filter(None, (request.inputs, request.negative_inputs)):
            pipe.target.encode_ahead(inputs)
        if reader is not None:
            reader.encode_ahead(request.draft_inputs or request.inputs)
    return call, make_output


@dataclass(frozen=True)
class RowUpdate:
    """Update of one request after a round.

    Attributes:
        handle: handle of the request.
        tokens: new tokens of each of its rows.
        output: the output of the finished request, as returned by a call of the pipeline; None before. The
            rows of a finished request are free.
        error: the error of a failed request; the output has the tokens decoded before. It is an
            OutOfMemoryError if the device had too little memory for a round, which ends the newest request.
            An error of a chunked prefill ends its request without an output.
        logprobs: of the new tokens of each row; empty lists if the request does not ask for them.
    """

    handle: int
    tokens: list[RowOutput]
    output: CallOutput | None = None
    error: Exception | None = None
    logprobs: list[list[TokenLogprob]] = field(default_factory=list)


def new_logprobs(
    canvas: Canvas, rows: Sequence[int], tokens: Sequence[RowOutput]
) -> list[list[TokenLogprob]]:
    """Return the log-probabilities of the last output tokens of rows, as many as are given for each."""
    found = [canvas.logprobs[row] for row in rows]
    return [one[max(0, len(one) - len(new)) :] for one, new in zip(found, tokens, strict=True)]


@dataclass(eq=False)
class Running:
    """A request in the batch."""

    handle: int
    make_output: Callable[[Canvas], CallOutput]  # from the canvas of its rows
    rows: list[int]  # in the batch
    text_before: list[int]  # of the first row's `Request`
    prompt_tokens: int  # of the first row
    fresh: list[RowOutput]  # new tokens of each row that have not been reported
    cached_tokens: int = 0  # of its prompts, which the prefix cache supplied

    def take(self, tokens: Sequence[RowOutput]) -> None:
        """Add new tokens of its rows."""
        for fresh, new in zip(self.fresh, tokens, strict=True):
            fresh.extend(new)


@dataclass(eq=False)
class Waiting:
    """A request whose prefill has not ended.

    Attributes:
        is_alone: whether its prefill includes no other request, because one that did has failed.
    """

    running: Running
    call: Call
    is_alone: bool = False

    @property
    def length(self) -> int:
        """Number of tokens of its prompts."""
        length: int = sum(self.call.canvas.prompt_lengths) * (1 + self.call.sampler.is_guided)
        return length


class Begun(NamedTuple):
    """Requests whose prefill has ended.

    Attributes:
        batch: of their rows.
        tokens: the first ones of each row.
        cached: number of tokens of each prompt that the prefix cache supplied.
    """

    batch: Batch[TargetState]
    tokens: list[RowOutput]
    cached: Sequence[int]


@dataclass(eq=False)
class Reading:
    """The prefill of requests, whose rows form one batch.

    Attributes:
        members: the requests, those that have waited longest.
        canvas: of all of their rows.
        prefill: of their prompts, by the target and, if they are long, by the drafter.
        tokens: number of tokens of its next forward pass; 0 before the prefill has begun.
    """

    members: Sequence[Waiting]
    canvas: Canvas
    prefill: ChunkedPrefill[Begun]
    tokens: int = 0

    @property
    def parts(self) -> list[slice]:
        """The rows of each request."""
        ends = accumulate((len(each.call.requests) for each in self.members), initial=0)
        return [slice(first, end) for first, end in pairwise(ends)]

    def advance(self) -> Begun | None:
        """Begin the prefill, or run its next forward pass; returns its result after the last one."""
        try:
            self.tokens = next(self.prefill)
        except StopIteration as end:
            result: Begun = end.value
            return result
        return None


class RunningBatch:
    """Running batch (continuous batching): a batch that requests enter and leave between rounds.

    Open it with `pipe.running_batch` in a `with` block.

    Args:
        pipe: the pipeline, which is busy until `close`.
        rows: maximum number of rows that are decoded together. An image is one row, also with guidance.
        is_locked: whether the caller has locked the pipeline, to open several batches that take turns.

    Raises:
        InputError: `rows` is out of range, or the model or accelerator cannot change rows during decoding.
        PipelineBusyError: another call is running.
    """

    def __init__(self, pipe: MMSpecPipeline, rows: int, is_locked: bool = False) -> None:
        if not is_integer(rows) or not 1 <= rows <= MOST_ROWS:
            raise InputError("rows", rows, f"must be an integer from 1 to {MOST_ROWS}")
        check_rows_move(pipe)
        self.pipe, self.rows = pipe, rows
        self._held = ExitStack()
        if not is_locked:
            self._held.enter_context(pipe._busy())
        self._past = DecodingStats(pipe.accelerator.name, pipe.accelerator.exactness)
        self._batch: Batch[TargetState] | None = None
        self._running: list[Running] = []
        self._waiting: list[Waiting] = []  # in the order in which they entered
        self._reading: Reading | None = None  # of the first ones that wait
        self._handles = 0
        self._has_slots = pipe.target.has_fixed_rows
        self._decoder = pipe.accelerator.decoder_of_any
        drafter = self._decoder.drafter
        self._joins_at_once = drafter.is_plain or drafter.draws_anew or isinstance(drafter, PacedDrafter)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def stats(self) -> DecodingStats:
        """Statistics since the batch was opened; the rows of finished requests are merged into one."""
        if self._batch is None:
            return self._past
        rows = [row for running in self._running for row in running.rows]
        return merge_stats([self._past, self._batch.canvas.stats.part(rows)])

    @property
    def free(self) -> int:
        """Number of free rows."""
        return self.rows - sum(len(each.fresh) for each in self._all)

    @property
    def _decoded(self) -> int:
        """Number of rows that are decoded."""
        return sum(len(each.rows) for each in self._running)

    @property
    def handles(self) -> list[int]:
        """Handles of the requests in the batch, in the order in which they entered."""
        return [each.handle for each in self._all]

    @property
    def _all(self) -> list[Running]:
        """The requests in the batch, with those whose prefill has not ended."""
        return [*self._running, *(each.running for each in self._waiting)]

    def prompt_tokens(self, handle: int) -> int:
        """Return the length of a request's first prompt, visual tokens included; 0 if not in the batch."""
        return next((each.prompt_tokens for each in self._all if each.handle == handle), 0)

    def text_before(self, handle: int) -> list[int]:
        """Return the last tokens of a request's first prompt if the output continues their text, else []."""
        return next((each.text_before for each in self._all if each.handle == handle), [])

    @torch.inference_mode()
    def enter(self, prompt: object, **arguments: object) -> int:
        """Add a request to the batch: run its prefill, and decode it from the next round on.

        With chunked prefill (`MMSpecPipeline.enable_chunked_prefill`), the next steps run the prefill.

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
        return self._enter(*self.pipe._prepare_request(prompt, arguments))

    @torch.inference_mode()
    def enter_prepared(self, request: PreparedRequest) -> int:
        """Add a request of `prepare_request` to the batch; returns and raises what `enter` does."""
        return self._enter(*request)

    def _enter(self, call: Call, make_output: Callable[[Canvas], CallOutput], at_once: bool = False) -> int:
        count = len(call.requests)
        if count > self.rows:
            raise InputError("rows", count, f"must be at most {self.rows}, the rows of the running batch")
        if count > self.free:
            raise NoRoomError(f"{self.free} rows are free, {count} are needed; enter the request again later")
        if any(each.is_guided != call.sampler.is_guided for each in self._samplers):
            raise NoRoomError(
                "requests with and without guidance cannot be decoded together; enter the request again later"
            )
        accelerator, target = self.pipe.accelerator, self.pipe.target
        if call.accelerator.name != accelerator.name and call.canvas.stopping[0].lockstep is None:
            rule = "must be 'none'; the hooks of the model treat several tokens differently from a single one"
            raise InputError("accelerator", accelerator.name, rule)
        self._decoder.admit(call.requests, call.sampler, call.canvas.stopping[0])
        before, length = call.requests[0].text_before, call.canvas.prompt_lengths[0]
        running = Running(self._handles, make_output, [], before, length, [[] for _ in range(count)])
        new = Waiting(running, call)
        if at_once or target.prefill_tokens is None:
            reading = self._begin_reading([new])
            self._join(reading, finish(reading.prefill))
        else:
            self._waiting.append(new)
        self._handles += 1
        return running.handle

    @property
    def _samplers(self) -> list[RowSettings]:
        """Settings of the rows in the batch, and of those whose prefill has not ended."""
        running = [self._of_batch.sampler] if self._running else []
        return [*running, *(each.call.sampler for each in self._waiting)]

    def _choose_members(self) -> list[Waiting]:
        """The requests to prefill next: the one that has waited longest, and short ones behind it."""
        first, *others = self._waiting
        target, known, left = self.pipe.target, self._batch, self.pipe.target.prefill_tokens or 0
        # the forward passes of further numbers of rows would be captured, and their caches kept
        is_new_size = self._has_slots and (known is None or not self._joins_at_once)
        if not target.reads_together or is_new_size:
            return [first]
        members = []
        for each in (first, *others):
            left -= each.length
            if left < 0 or each.is_alone or each.call.canvas.in_step:
                break
            members.append(each)
        return members or [first]

    def _begin_reading(self, members: Sequence[Waiting]) -> Reading:
        """Begin the prefill of requests, whose rows form one batch."""
        calls = [each.call for each in members]
        requests = [request for call in calls for request in call.requests]
        sampler, canvas, random = calls[0].sampler, calls[0].canvas, calls[0].random
        if len(calls) > 1:  # those of the calls stay as they are, in case that each is prefilled alone
            ends = accumulate(len(each.requests) for each in calls)
            for before, call in zip(ends, calls[1:], strict=False):
                sampler = sampler.joined(call.sampler, (before, len(call.requests)))
            ids = [row for call in calls for row in call.canvas.ids]
            stopping = [row for call in calls for row in call.canvas.stopping]
            stats = DecodingStats(canvas.stats.accelerator, canvas.stats.exactness, canvas.stats.keeps)
            canvas = Canvas(ids, stopping, stats, canvas.device)
            random = replace(random, keys=torch.cat([call.random.keys for call in calls]))
        if self._has_slots:
            sampler = self._on_device(sampler, len(requests))
        prefill = self._prefill(requests, sampler, canvas, random, is_shared=len(calls) > 1)
        return Reading(members, canvas, prefill)

    def _prefill(
        self,
        requests: Sequence[Request],
        sampler: RowSettings,
        canvas: Canvas,
        random: RandomStream,
        is_shared: bool,
    ) -> ChunkedPrefill[Begun]:
        """Prefill requests, and choose their first tokens; the first arguments are those of `speculate`.

        Args:
            is_shared: whether they are several requests.
        """
        target = self.pipe.target
        where = target, self._decoder, sampler, requests, canvas
        prefilled = yield from prefill_requests(*where, is_copied=is_shared)
        is_long = max(canvas.prompt_lengths) > (target.prefill_tokens or inf)
        # a graph for each number of rows would cost more captures than it saves launches, and the rounds
        # between the parts of a drafter's prefill may overwrite the results of a graph
        graphs = target.graphs if self._has_slots and not (is_shared or is_long) else None
        batch, prompts = begin(*where, random, prefilled, graphs)
        try:
            if is_long:
                yield from batch.prefill_draft()
        except BaseException:
            batch.state.close()
            raise
        return Begun(batch, prompts.emission.tokens, prefilled[1].cached)

    def _join(self, reading: Reading, begun: Begun) -> None:
        """Add the rows of requests to the batch after their prefill."""
        canvas, (batch, first, cached) = reading.canvas, begun
        emitted = [first]
        try:
            self._read_rounds()
            if not (self._joins_at_once or canvas.finished):
                # the first round runs alone, after which windows can be joined
                batch.decode_round()
                emitted.append(batch.read_round().tokens)
                batch.tighten()
            rows = self._fill_slots(batch) if self._has_slots else self._append(batch)
        except BaseException:
            batch.state.close()
            raise
        for each, part in zip(reading.members, reading.parts, strict=True):
            running = each.running
            for tokens in emitted:
                running.take(tokens[part])
            copies = range(0, len(cached), len(canvas.ids))  # two under guidance
            running.cached_tokens = sum(sum(cached[copy:][part]) for copy in copies)
            running.rows = rows[part]
            self._running.append(running)

    def _prefill_some(self) -> list[RowUpdate]:
        """Prefill up to `prefill_tokens` tokens, and at least one chunk, in the order of requests.

        Returns:
            Updates of requests that failed. Those whose prefill has ended have joined the batch.
        """
        failed: list[RowUpdate] = []
        most = left = self.pipe.target.prefill_tokens or 0
        while self._waiting:
            if self._reading is None:
                self._reading = self._begin_reading(self._choose_members())
            reading = self._reading
            if left < most and reading.tokens > left:
                break
            left -= reading.tokens
            try:
                begun = reading.advance()
                if begun is not None:
                    self._join(reading, begun)
                    self._reading, self._waiting = None, self._waiting[len(reading.members) :]
            except Exception as error:
                failed += self._stop_reading(error)
            except BaseException:
                self.close()
                raise
        return failed

    def _stop_reading(self, error: Exception | None = None) -> list[RowUpdate]:
        """Stop a prefill. Its request ends if it failed; several requests wait again, each for its own.

        Args:
            error: of the prefill; None if the prefill has not failed.
        """
        reading, self._reading = self._reading, None
        if reading is None:
            return []
        reading.prefill.close()
        if error is None or len(reading.members) > 1:
            for each in reading.members:
                each.is_alone = error is not None
            return []
        self._waiting.remove(reading.members[0])
        running = reading.members[0].running
        return [RowUpdate(running.handle, running.fresh, error=error)]

    def _on_device(self, sampler: RowSettings, count: int) -> RowSettings:
        """Return the settings of new rows in a form that shares graphs with those of the batch."""
        own = sampler.on_device(count, self.pipe.target.device)
        known = None if self._batch is None else self._batch.sampler
        if isinstance(own, Sampler) and isinstance(known, Sampler):
            return own if own.numbers is None or known.numbers is None else own.using(known)
        return own

    @property
    def _of_batch(self) -> Batch[TargetState]:
        """The batch; there is one while requests are running."""
        return cast("Batch[TargetState]", self._batch)

    def _append(self, new: Batch[TargetState]) -> list[int]:
        """Append the rows of a request to the batch, and return their indices."""
        count, first = len(new.canvas.ids), self._decoded
        self._batch = new if self._batch is None else self._batch.joined(new)
        return list(range(first, first + count))

    def _fill_slots(self, new: Batch[TargetState]) -> list[int]:
        """Write the rows of a request to free slots, and return these."""
        new.use_few_sizes()
        count, before = len(new.canvas.ids), self._batch
        if before is not None and before.sampler.is_guided != new.sampler.is_guided:
            self._close_batch()  # nothing runs: see `_enter`
        if self._batch is None:
            size = self._size_for(count)
            self._batch = new.part([min(slot, count - 1) for slot in range(size)])
            self._batch.canvas.retire(range(count, size))
            return list(range(count))
        if count > len(free := self._free_slots):
            self._resize(self._size_for(self._decoded + count))
            free = self._free_slots
        self._batch = self._of_batch.overwritten(free[:count], new)
        return free[:count]

    def _size_for(self, count: int) -> int:
        """Number of slots for a number of rows."""
        return min(rows_of_graph(count), self.rows)

    @property
    def _free_slots(self) -> list[int]:
        taken = {row for running in self._running for row in running.rows}
        return [slot for slot in range(len(self._of_batch.canvas.ids)) if slot not in taken]

    def _resize(self, size: int) -> None:
        """Change the number of slots: copies of a row fill new ones; rows of lost ones move to free ones."""
        count, free = len(self._of_batch.canvas.ids), self._free_slots
        order = [*range(min(size, count)), *[0] * (size - count)]
        for running in self._running:
            for index, row in enumerate(running.rows):
                if row >= size:
                    running.rows[index] = free.pop(0)
                    order[running.rows[index]] = row
        self._batch = self._of_batch.part(order)
        self._batch.canvas.retire(range(count, size))

    @torch.inference_mode()
    def capture(self) -> None:
        """Capture the graphs of rounds now, for every number of slots, in a compiled pipeline on a GPU.

        Buffers are allocated for all rows of up to 2,048 tokens. They grow to powers of two, and each such
        size is captured when a request first needs it. Requests with settings of other kinds than
        temperature, top-p and a top-k of up to 64 are captured when they come.
        """
        if not self._has_slots or self._running:
            return
        for _ in range(ROUNDS_TO_CAPTURE):
            for example in self._examples():  # the batch keeps the kinds of their settings
                call = example if isinstance(example, Call) else example.batch(0, 1)
                self.cancel(self._enter(call, no_output, at_once=True))
        for size in sorted({self._size_for(1 + row) for row in range(self.rows)}, reverse=True):
            self._resize(size)
            batch = self._of_batch
            batch.reserve(CAPTURED_PLACES)
            self._choose_graphs()
            with closing(self._decoder.drafter.rehearse(self.pipe.target.device)) as kinds:
                for _ in kinds:
                    for _ in range(ROUNDS_TO_CAPTURE):
                        batch.decode_round()
                        batch.read_round()
                        batch.tighten()
        rows = self._of_batch.canvas.stats.of_rows_alone()
        self._of_batch.canvas.stats = replace(rows, target_forwards=0)
        self._past = DecodingStats(self._past.accelerator, self._past.exactness)

    def _examples(self) -> list[Call | ImageCall]:
        """Requests whose settings are of the usual kinds."""
        pipe = self.pipe
        examples, other = [*pipe._examples(1)], pipe._examples(1)[0]
        if isinstance(other, Call) and not pipe.accelerator.rule.greedy_only:
            settings: AnySampler = other.sampler
            usual = replace(settings, temperature=1.0, top_k=USUAL_TOP_K, top_p=0.9)
            examples.append(replace(other, sampler=usual))
        return examples

    def _choose_graphs(self) -> None:
        """Replay the next round from a graph, unless the host has a part in it."""
        batch = self._of_batch
        by_graph = not (batch.canvas.in_step or batch.sampler.reads_ids or not batch.decoder.runs_ahead)
        batch.graphs = self.pipe.target.graphs if self._has_slots and by_graph else None

    @torch.inference_mode()
    def step(self) -> list[RowUpdate]:
        """Decode one round and return its updates; the rows of finished requests become free.

        With chunked prefill, a part of the waiting prompts is prefilled before the round.

        Raises:
            BaseException: an error of the model; the batch is closed and its requests are lost.
        """
        failed = self._prefill_some()
        if self._batch is None or not self._running:
            return failed
        failed += self._decode_round()
        canvas = self._batch.canvas
        if any(canvas.finish_reasons[row] is not None for each in self._running for row in each.rows):
            self._read_rounds()
        updates, ended = [], []
        for running in self._running:
            fresh, running.fresh = running.fresh, [[] for _ in running.rows]
            logprobs = new_logprobs(canvas, running.rows, fresh)
            if any(canvas.finish_reasons[row] is None for row in running.rows):
                if any(map(len, fresh)):
                    updates.append(RowUpdate(running.handle, fresh, logprobs=logprobs))
                continue
            ended.append(running)
            own = canvas.part(running.rows)
            own.stats = own.stats.of_rows_alone()
            own.stats.cached_prompt_tokens = running.cached_tokens
            error = next((error for error in own.errors if error is not None), None)
            updates.append(RowUpdate(running.handle, fresh, running.make_output(own), error, logprobs))
        left = {row for running in ended for row in running.rows}.intersection(canvas.without_errors)
        if ended:
            target = self.pipe.target
            target.remember(self._of_batch.state, canvas.outputs(), sorted(left))
        self._remove(ended)
        return [*updates, *failed]

    def _decode_round(self) -> list[RowUpdate]:
        """Decode a round, and return the updates of requests that it had to end for want of memory."""
        ended: list[RowUpdate] = []
        while True:
            batch = self._of_batch
            canvas = batch.canvas
            running = [row for each in self._running for row in each.rows]
            if all(canvas.finish_reasons[row] is not None for row in running):
                return ended
            self._choose_graphs()
            before = batch.snapshot()
            try:
                batch.decode_round()
                self._read_rounds(self._rounds_ahead)
            except torch.OutOfMemoryError as error:
                if len(self._running) == 1 and not self._in_prefill or not before.restore():
                    self.close()
                    raise
                ended += self._end_newest(error)
                continue
            except BaseException:
                self.close()
                raise
            return ended

    @property
    def _rounds_ahead(self) -> int:
        """Number of rounds that a GPU may compute before the host reads them; see `speculate`."""
        batch = self._of_batch
        decides = any(stopping.criteria or stopping.of_output for stopping in batch.canvas.stopping)
        return 0 if batch.graphs is None or decides else 1

    def _read_rounds(self, ahead: int = 0) -> None:
        """Read rounds until so many are unread, and add their tokens to the running requests."""
        batch = self._batch
        while batch is not None and batch.canvas.unread > ahead:
            tokens = batch.read_round().tokens
            for each in self._running:
                each.take([tokens[row] for row in each.rows])
            batch.tighten()

    @property
    def _in_prefill(self) -> bool:
        """Whether a prefill has begun, and therefore takes memory."""
        return self._reading is not None and self._reading.tokens > 0

    def _end_newest(self, error: torch.OutOfMemoryError) -> list[RowUpdate]:
        """End the request that entered last and takes memory, so that the others have it."""
        if self._in_prefill:
            return self._stop_reading(error)
        self._read_rounds()
        newest = self._running[-1]
        canvas = self._of_batch.canvas
        canvas.retire(newest.rows)
        own = canvas.part(newest.rows)
        own.stats = own.stats.of_rows_alone()
        self._remove([newest])
        if self._has_slots:
            self._resize(self._decoded)  # no free slots, whose rows take memory too
        return [RowUpdate(newest.handle, newest.fresh, newest.make_output(own), error)]

    def cancel(self, handle: int) -> None:
        """Cancel a request; its rows are free at once.

        Raises:
            InputError: the batch has no request with this handle.
        """
        waiting = [each for each in self._waiting if each.running.handle == handle]
        if self._reading is not None and any(each in self._reading.members for each in waiting):
            self._stop_reading()
        self._waiting = [each for each in self._waiting if each not in waiting]
        found = [each for each in self._running if each.handle == handle]
        if not found and not waiting:
            known = self.handles or "there is none"
            raise InputError("handle", handle, f"must be that of a request in the batch: {known}")
        self._remove(found)

    def close(self) -> None:
        """Cancel all requests and release the pipeline."""
        self._stop_reading()
        self._waiting = []
        self._remove(list(self._running))
        self._close_batch()
        self._held.close()

    def _close_batch(self) -> None:
        """Close a batch in which no request runs."""
        if self._batch is not None:
            self._past = merge_stats([self._past, self._batch.canvas.stats.part([])])
            self._batch.state.close()
            self._batch = None

    @torch.inference_mode()
    def _remove(self, gone: Sequence[Running]) -> None:
        if not gone or self._batch is None:
            return
        self._read_rounds()
        left = [row for running in gone for row in running.rows]
        self._running = [running for running in self._running if running not in gone]
        canvas = self._batch.canvas
        if self._has_slots:
            self._add_up(canvas.stats.part(left).of_rows_alone())
            canvas.retire(left)
            size = self._size_for(LEAST_SHARE * (self._decoded))
            if self._running and size < len(canvas.ids):
                self._resize(size)
            return
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


def no_output(canvas: Canvas) -> CallOutput:
    """The output of a request that is cancelled."""
    raise AssertionError("the request was cancelled")


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
    if target.steps is not None and not target.has_fixed_rows:
        rule = "must be captured on a GPU; a CPU's are compiled for one batch size, which a running batch "
        rule += "changes: load the model without `compile`"
        raise InputError("compiled steps", type(pipe.model).__name__, rule)
