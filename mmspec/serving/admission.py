"""Requests that wait for a place in the batch: a bounded queue, and the way back from the worker's thread."""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from mmspec.serving.errors import RequestError

__all__ = ["Event", "Row", "Ticket", "WaitingRows"]


@dataclass(frozen=True)
class Event:
    """What a worker has to say about a row. The first one of a row, if it is no error, says it has entered.

    Attributes:
        text: new text.
        finish_reason: why the row has ended; None while it goes on.
        output: of the pipeline, once it has ended.
        error: why there is none.
        prompt_tokens: in the first event, the length of the prompt.
    """

    text: str = ""
    finish_reason: str | None = None
    output: Any = None
    error: BaseException | None = None
    prompt_tokens: int = 0


@dataclass(frozen=True, eq=False)
class Row:
    """One row of the batch that a request asks for: the arguments of `enter`."""

    prompt: Any
    settings: dict[str, Any]
    ticket: Ticket
    index: int

    def tell(self, event: Event) -> None:
        """Hand an event to the request, from any thread."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody is there to be told
            self.ticket.loop.call_soon_threadsafe(self.ticket.events.put_nowait, (self.index, event))


class Ticket:
    """One request: its rows, and the events that they give. Belongs to the event loop that made it.

    Args:
        prompt: of all rows.
        settings: of each row.
        names: of the request's fields, by the arguments of the pipeline that they became; for errors.
    """

    def __init__(
        self, prompt: Any, settings: Sequence[dict[str, Any]], names: Mapping[str, str] | None = None
    ) -> None:
        self.loop = asyncio.get_running_loop()
        self.events: asyncio.Queue[tuple[int, Event]] = asyncio.Queue()
        self.names = names or {}
        self.rows = [Row(prompt, one, self, index) for index, one in enumerate(settings)]
        self.began = perf_counter()
        self.prompt_tokens = 0
        self.is_cancelled = False  # set here, read by the worker before each round

    async def entered(self, seconds: float) -> None:
        """Wait until every row has a place in the batch; text that comes meanwhile is kept.

        Raises:
            RequestError: it took too long (504).
            Exception: what a row was refused for.
        """
        waiting, early = {row.index for row in self.rows}, []
        deadline = self.loop.time() + seconds
        while waiting:
            index, event = await self._next(
                deadline, f"no place in the batch within wait_seconds={seconds:g}"
            )
            if event.error is not None:
                raise event.error
            if index in waiting:
                self.prompt_tokens = event.prompt_tokens
                waiting.discard(index)
            else:
                early.append((index, event))
        for one in early:
            self.events.put_nowait(one)

    async def updates(self, seconds: float) -> AsyncIterator[tuple[int, Event]]:
        """Yield the events of all rows, each with the row's index, until all have ended.

        Raises:
            RequestError: it took too long (504).
            Exception: what a row has failed with.
        """
        running, deadline = len(self.rows), self.loop.time() + seconds
        while running:
            index, event = await self._next(deadline, f"not done within run_seconds={seconds:g}")
            if event.error is not None:
                raise event.error
            running -= event.finish_reason is not None
            yield index, event

    async def _next(self, deadline: float, what: str) -> tuple[int, Event]:
        try:
            async with asyncio.timeout_at(deadline):
                return await self.events.get()
        except TimeoutError:
            raise RequestError(504, f"{what}; ask for less, or try again later", code="timeout") from None


class WaitingRows:
    """Rows that wait, first come first; bounded, and closed when the worker ends.

    Args:
        limit: most rows that wait.
    """

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.changed = threading.Condition()
        self.is_closed = False
        self._rows: deque[Row] = deque()

    def __len__(self) -> int:
        return len(self._rows)

    def add(self, rows: Sequence[Row]) -> None:
        """Let rows wait, all of them or none.

        Raises:
            RequestError: there is no room (429), or the worker has ended (503).
        """
        with self.changed:
            if self.is_closed:
                raise RequestError(503, "the model is not running; see /health")
            if len(self._rows) + len(rows) > self.limit:
                text = f"{len(self._rows)} rows are waiting, and max_waiting={self.limit}; try again later"
                raise RequestError(429, text, code="queue_full", retry_after=1)
            self._rows.extend(rows)
            self.changed.notify_all()

    def cancel(self, ticket: Ticket) -> None:
        """Take back the rows of a request, and mark it for the worker, which may have taken them."""
        with self.changed:
            ticket.is_cancelled = True
            self._rows = deque(row for row in self._rows if row.ticket is not ticket)
            self.changed.notify_all()

    def take(self) -> Row | None:
        """Take the row that has waited longest; None if there is none."""
        with self.changed:
            return self._rows.popleft() if self._rows else None

    def put_back(self, row: Row) -> None:
        """Let a row that was taken wait in front of all others, unless it was cancelled."""
        with self.changed:
            if not row.ticket.is_cancelled:
                self._rows.appendleft(row)

    def wait(self) -> None:
        """Block until a row waits, or the queue is closed."""
        with self.changed:
            self.changed.wait_for(lambda: self._rows or self.is_closed)

    def close(self) -> list[Row]:
        """Accept no more rows; return those that waited."""
        with self.changed:
            self.is_closed = True
            left, self._rows = list(self._rows), deque()
            self.changed.notify_all()
        return left
