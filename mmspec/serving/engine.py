"""Engine of the server: a queue of waiting rows, and a worker thread that decodes the running batch.

The worker decodes rounds and sends their results as events to the event loops of the requests. Another thread
prepares the first waiting rows of text meanwhile: it tokenises their prompts and encodes their images.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import threading
from collections import deque
from collections.abc import AsyncIterator, Callable, Hashable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from itertools import islice
from time import monotonic, perf_counter
from typing import Any

from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError, MMSpecError, NoRoomError
from mmspec.open_types import Keywords
from mmspec.pipelines import ImageGenerationPipeline, SpeechPipeline
from mmspec.pipelines.response_format import prepare_grammars
from mmspec.pipelines.running_batch import PreparedRequest
from mmspec.serving.errors import RequestError, as_request_error
from mmspec.serving.metrics import ModelMetrics, RowTimes
from mmspec.serving.request_log import fields_of, request_id
from mmspec.serving.rows import Event, TextRows, WholeCalls, open_rows, prepare_row, why_in_turn

__all__ = ["IMAGES", "TEXT", "TRANSCRIPTS", "Engine", "Ticket"]

TEXT, IMAGES, TRANSCRIPTS = "text", "images", "transcripts"
logger = logging.getLogger(__name__)


def made_by(pipeline: Any) -> str:
    """Return what the model of a pipeline makes."""
    if isinstance(pipeline, ImageGenerationPipeline):
        return IMAGES
    return TRANSCRIPTS if isinstance(pipeline, SpeechPipeline) else TEXT


@dataclass(eq=False)
class Row:
    """One row of a request: the arguments of `enter`.

    Attributes:
        prepared: the prepared request, or the error of its preparation; None before.
    """

    prompt: Any
    settings: Keywords
    ticket: Ticket
    index: int
    times: RowTimes
    prepared: Future[PreparedRequest] | None = None

    def tell(self, event: Event) -> None:
        """Send an event to the request, from any thread."""
        with contextlib.suppress(RuntimeError):  # the event loop is closed
            self.ticket.loop.call_soon_threadsafe(self.ticket.events.put_nowait, (self.index, event))


class Ticket:
    """One request: its rows and their events. It belongs to the event loop in which it was created.

    Args:
        prompts: prompt of each row.
        settings: settings of each row.
        queue: in which the rows wait.
        names: field names of the request by pipeline argument, for error messages.

    Attributes:
        prompt_tokens: length of the prompt of each row whose prompt has been read, else 0.
    """

    def __init__(
        self,
        prompts: Sequence[Any],
        settings: Sequence[Keywords],
        queue: WaitingRows,
        names: Mapping[str, str] | None = None,
    ) -> None:
        self.queue = queue
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self._early: deque[tuple[int, Event]] = deque()  # of rows that had entered before others
        self.names = names or {}
        self.began = perf_counter()
        pairs = enumerate(zip(prompts, settings, strict=True))
        self.rows = [Row(prompt, one, self, index, RowTimes(self.began)) for index, (prompt, one) in pairs]
        self.prompt_tokens = [0] * len(self.rows)
        self.request_id = request_id.get()  # for the log of the worker, which serves all requests
        self.stats: list[DecodingStats] = []  # of finished rows
        self.is_cancelled = False  # set here, read by the worker before each round

    async def entered(self, seconds: float) -> None:
        """Wait until the prompt of every row has been read; earlier text is kept.

        Args:
            seconds: how long to wait while no row leaves the queue. There is no limit while the queue moves:
                its length is limited.

        Raises:
            RequestError: a timeout expired (504).
            Exception: the error of a refused row.
        """
        waiting, early, began = {row.index for row in self.rows}, [], monotonic()
        while waiting:
            index, event = await self._next(
                lambda: max(began, self.queue.last_move) + seconds,
                f"no request entered the batch within wait_seconds={seconds:g}",
            )
            if event.error is not None:
                raise event.error
            if index in waiting:
                self.prompt_tokens[index] = event.prompt_tokens
                waiting.discard(index)
            else:
                early.append((index, event))
        self._early.extend(early)  # before those that have come meanwhile

    async def updates(self, seconds: float) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all rows, each with the row's index, until all have ended.

        Raises:
            RequestError: a timeout expired (504).
            Exception: the error of a failed row.
        """
        running, deadline = len(self.rows), monotonic() + seconds
        while running:
            index, event = await self._next(
                lambda: deadline, f"the request was not finished within run_seconds={seconds:g}"
            )
            if event.error is not None:
                raise event.error
            if event.finish_reason is not None:
                self.stats.append(event.output.stats)
                running -= 1
            yield index, event

    async def _next(self, deadline: Callable[[], float], what: str) -> tuple[int, Event]:
        """Return the next event. The deadline may move meanwhile."""
        if self._early:
            return self._early.popleft()
        while self.events.empty() and (left := deadline() - monotonic()) > 0:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left):
                    return await self.events.get()
        if self.events.empty():
            raise RequestError(504, f"{what}; send a smaller request, or retry later", code="timeout")
        return self.events.get_nowait()


class WaitingRows:
    """Bounded first-in, first-out queue of rows, closed when the worker ends.

    Args:
        limit: largest number of rows.
        ahead: number of the first rows that another thread prepares, before they can be taken; 0 for none.

    Attributes:
        last_move: when a row last entered the batch or was refused, in `time.monotonic` seconds.
    """

    def __init__(self, limit: int, ahead: int = 0) -> None:
        self.limit, self.ahead, self.last_move = limit, ahead, 0.0
        self.changed = threading.Condition()
        self.is_closed = False
        self._rows: deque[Row] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Add rows to the queue, all of them or none."""
        with self.changed:
            if self.is_closed:
                raise RequestError(503, "the model is not running; see /health")
            if len(self._rows) + len(rows) > self.limit:
                text = f"the queue is full: {len(self._rows)} of max_waiting={self.limit} rows; retry later"
                raise RequestError(429, text, code="queue_full", retry_after=1)
            self._rows.extend(rows)
            self.changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Remove the rows of a request, and mark the request as cancelled for the worker."""
        with self.changed:
            ticket.is_cancelled = True
            self._rows = deque(row for row in self._rows if row.ticket is not ticket)
            self.changed.notify_all()

    @property
    def _has_first(self) -> bool:
        """Whether the first row can be taken."""
        return bool(self._rows) and (not self.ahead or self._rows[0].prepared is not None)

    def take(self) -> Row | None:
        """Remove and return the first row; None if there is none, or if it is not prepared."""
        with self.changed:
            if not self._has_first:
                return None
            self.changed.notify_all()  # a further row can be prepared
            return self._rows.popleft()

    def prepare(self, prepare: Callable[[Row], PreparedRequest]) -> None:
        """Prepare the first rows, one after another, until the queue is closed."""
        while True:
            with self.changed:
                self.changed.wait_for(lambda: self.is_closed or self._unprepared is not None)
                row = self._unprepared
                if self.is_closed or row is None:
                    return
            prepared: Future[PreparedRequest] = Future()
            try:
                prepared.set_result(prepare(row))
            except BaseException as error:  # raised where the row enters the batch
                prepared.set_exception(error)
            with self.changed:
                row.prepared = prepared
                self.changed.notify_all()

    @property
    def _unprepared(self) -> Row | None:
        """The row to prepare next."""
        return next((row for row in islice(self._rows, self.ahead) if row.prepared is None), None)

    def put_back(self, row: Row) -> None:
        """Put a row back to the front of the queue, unless it was cancelled."""
        with self.changed:
            if not row.ticket.is_cancelled:
                self._rows.appendleft(row)

    def wait(self) -> None:
        """Block until a row can be taken or the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self._has_first or self.is_closed)

    def close(self) -> list[Row]:
        """Close the queue; return its rows."""
        with self.changed:
            self.is_closed = True
            left, self._rows = list(self._rows), deque()
            self.changed.notify_all()
        return left


class Engine:
    """Engine of one model: its running batch, decoded in a worker thread.

    Rows enter between rounds in order of arrival. A cancelled request leaves before the next round. An error
    of one row does not affect the others; an error of a round ends its rows, and a new batch is opened.

    Args:
        name: of the model.
        pipeline: its pipeline.
        rows: largest number of rows in the batch.
        max_waiting: largest number of waiting rows.
        metrics: metrics of this model.
        adapters: names of the LoRA adapters of the model, which are models of their own in requests.

    Attributes:
        makes: what the model makes: TEXT, IMAGES or TRANSCRIPTS.
        is_ready: set when requests can enter, or the worker has ended.
    """

    def __init__(
        self,
        name: str,
        pipeline: Any,
        rows: int,
        max_waiting: int,
        metrics: ModelMetrics,
        adapters: Sequence[str] = (),
    ) -> None:
        self.name, self.pipeline, self.rows, self.metrics = name, pipeline, rows, metrics
        self.adapters = tuple(adapters)
        self.makes = made_by(pipeline)
        prepares = self.makes == TEXT and not adapters and why_in_turn(pipeline) is None
        self.waiting = WaitingRows(max_waiting, rows if prepares else 0)
        self.is_ready = threading.Event()
        self._running: dict[Hashable, Row] = {}
        self._thread = threading.Thread(target=self._work, name=f"mmspec {name}", daemon=True)
        metrics.watch(lambda: self.running, lambda: len(self.waiting))
        metrics.watch_memory(lambda: getattr(self.pipeline.target, "prefix_cache", None))

    @property
    def running(self) -> int:
        """Number of rows in the batch."""
        return len(self._running)

    @property
    def is_alive(self) -> bool:
        """Whether the worker runs and accepts requests."""
        return self._thread.is_alive() and not self.waiting.is_closed

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def close(self, seconds: float = 20) -> None:
        """Refuse new requests, end the current ones, and wait for the worker to end."""
        self._fail(self.waiting.close(), RequestError(503, "the server is shutting down"))
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def submit(
        self,
        prompts: Sequence[object],
        settings: Sequence[Keywords],
        names: Mapping[str, str] | None = None,
    ) -> Ticket:
        """Queue a request with one row for each of the prompts and settings.

        Raises:
            RequestError: the queue is full (429), or the worker has ended (503).
        """
        ticket = Ticket(prompts, settings, self.waiting, names)
        self.waiting.add(ticket.rows)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """Cancel a request, before the next round at the latest; does nothing if it has ended."""
        self.waiting.cancel(ticket)

    def _work(self) -> None:
        try:
            if self.makes == TEXT:
                prepare_grammars(self.pipeline.model, self.pipeline.tokenizer)
            if self.waiting.ahead:
                name = f"mmspec {self.name} requests"
                threading.Thread(
                    target=self.waiting.prepare, args=[self._prepare], name=name, daemon=True
                ).start()
            while not self.waiting.is_closed:
                self._run_batch()
        except BaseException:
            logger.exception("the worker of %s has failed", self.name)
        finally:
            self.is_ready.set()
            left = [*self.waiting.close(), *self._running.values()]
            self._running = {}
            self._fail(left, RequestError(503, "the model has stopped; see /health"))

    def _run_batch(self) -> None:
        """Decode until the server closes or a round fails."""
        with open_rows(self.pipeline, self.rows, bool(self.adapters)) as batch:
            batch.capture()
            self.is_ready.set()
            while True:
                if not self._running:
                    self.waiting.wait()
                if self.waiting.is_closed:
                    return
                for handle in [one for one, row in self._running.items() if row.ticket.is_cancelled]:
                    batch.cancel(handle)
                    self.metrics.cancelled.inc()
                    del self._running[handle]
                while batch.free and (row := self.waiting.take()) is not None:
                    if not self._enter(batch, row):
                        self.waiting.put_back(row)
                        break
                if not self._running:
                    continue
                try:
                    updates = batch.step()
                except Exception as error:
                    ids = [row.ticket.request_id for row in self._running.values()]
                    logger.exception("a round of %s has failed", self.name, extra=fields_of(ids=ids))
                    failed, self._running = list(self._running.values()), {}
                    self._fail(failed, error)
                    return
                for handle, event in updates:
                    self._hand_out(handle, event)

    def _prepare(self, row: Row) -> PreparedRequest:
        return prepare_row(self.pipeline, row.prompt, **row.settings)

    def _enter(self, batch: TextRows | WholeCalls, row: Row) -> bool:
        """Enter a row into the batch, or send it the error; False if there is no room yet."""
        if row.ticket.is_cancelled:  # cancelled after it was removed from the queue
            return True
        began = perf_counter()
        try:
            known: Keywords = {} if row.prepared is None else {"prepared": row.prepared.result()}
            handle, prompt_tokens = batch.enter(row.prompt, **known, **row.settings)
        except NoRoomError:
            return False
        except Exception as error:
            if not isinstance(error, InputError):
                about = fields_of(id=row.ticket.request_id)
                logger.exception("a request to %s could not enter the batch", self.name, extra=about)
            self._fail([row], error)
        except BaseException:  # ends the worker, which answers the rows of the batch and of the queue
            self.waiting.put_back(row)
            raise
        else:
            self._running[handle] = row
            self.metrics.count_entered(row.times, began, prompt_tokens)
        self.waiting.last_move = monotonic()
        return True

    def _hand_out(self, handle: Hashable, event: Event) -> None:
        row = self._running.get(handle)
        if row is None:
            return
        self.metrics.count_tokens(row.times, event.tokens)
        if event.error is None and event.finish_reason is None:
            row.tell(event)
            return
        del self._running[handle]
        if event.error is not None:
            if not isinstance(event.error, MMSpecError):
                about = fields_of(id=row.ticket.request_id)
                logger.error("a row of %s has failed", self.name, exc_info=event.error, extra=about)
            self._fail([row], event.error)
        elif event.finish_reason is not None:
            self.metrics.count_finished(event.finish_reason, event.output.stats, row.times)
            row.tell(event)

    def _fail(self, rows: Sequence[Row], error: BaseException) -> None:
        for row in rows:
            answer = as_request_error(error, row.ticket.names)
            if answer.status >= 500:  # lower statuses are refused requests
                self.metrics.failed.inc()
            row.tell(Event(error=answer))
