"""A worker thread that owns a pipeline: lets rows in, takes rounds, hands out what they gave."""

from __future__ import annotations

import logging
import threading
from collections.abc import Mapping, Sequence
from typing import Any

from mmspec.errors import InputError, MMSpecError, NoRoomError
from mmspec.pipelines import ImageGenerationPipeline
from mmspec.serving.admission import Event, Row, Ticket, WaitingRows
from mmspec.serving.batched import open_rows
from mmspec.serving.errors import RequestError, as_request_error
from mmspec.serving.metrics import ModelMetrics

__all__ = ["Engine"]

logger = logging.getLogger(__name__)


class Engine:
    """One model at work: its running batch, in a thread of its own.

    Rows join between rounds while there are places, first come first. A request that is cancelled leaves
    before the next round. A row that fails is told so, and the others go on; a round that fails ends the
    rows in it, and the batch begins anew.

    Args:
        name: of the model, for clients.
        pipeline: used by this engine alone.
        rows: places in the batch.
        max_waiting: rows that may wait for one.
        metrics: counters of this model.
    """

    def __init__(self, name: str, pipeline: Any, rows: int, max_waiting: int, metrics: ModelMetrics) -> None:
        self.name, self.pipeline, self.rows, self.metrics = name, pipeline, rows, metrics
        self.draws = isinstance(pipeline, ImageGenerationPipeline)
        self.waiting = WaitingRows(max_waiting)
        self._running: dict[Any, Row] = {}
        self._thread = threading.Thread(target=self._work, name=f"mmspec {name}", daemon=True)
        metrics.watch(lambda: len(self._running), lambda: len(self.waiting))

    @property
    def is_alive(self) -> bool:
        """True while requests can be answered."""
        return self._thread.is_alive() and not self.waiting.is_closed

    def start(self) -> None:
        """Start the worker."""
        self._thread.start()

    def close(self, seconds: float = 20) -> None:
        """Refuse new requests, end those there are, and wait for the worker to end."""
        self._fail(self.waiting.close(), RequestError(503, "the server is shutting down"))
        if self._thread.ident is not None:
            self._thread.join(seconds)

    def submit(
        self, prompt: Any, settings: Sequence[dict[str, Any]], names: Mapping[str, str] | None = None
    ) -> Ticket:
        """Let a request wait for places in the batch: one row for each of the settings.

        Raises:
            RequestError: more rows than may wait (429), or the worker has ended (503).
        """
        ticket = Ticket(prompt, settings, names)
        self.waiting.add(ticket.rows)
        return ticket

    def cancel(self, ticket: Ticket) -> None:
        """End a request, before the next round at the latest; does nothing if it has ended."""
        self.waiting.cancel(ticket)

    def _work(self) -> None:
        try:
            while not self.waiting.is_closed:
                self._run_batch()
        except BaseException:
            logger.exception("the worker of %s has ended", self.name)
        finally:
            left = [*self.waiting.close(), *self._running.values()]
            self._running = {}
            self._fail(left, RequestError(503, "the model has stopped; see /health"))

    def _run_batch(self) -> None:
        """Decode until the server closes, or a round fails."""
        with open_rows(self.pipeline, self.rows) as batch:
            while True:
                if not self._running:
                    self.waiting.wait()
                if self.waiting.is_closed:
                    return
                for handle in [one for one, row in self._running.items() if row.ticket.is_cancelled]:
                    batch.cancel(handle)
                    self.metrics.count_cancelled()
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
                    logger.exception("a round of %s has failed", self.name)
                    failed, self._running = list(self._running.values()), {}
                    self._fail(failed, error)
                    return
                for update in updates:
                    self._hand_out(update)

    def _enter(self, batch: Any, row: Row) -> bool:
        """Let a row in, or tell it why not; False if it has to wait until others have left."""
        if row.ticket.is_cancelled:  # after it was taken
            return True
        try:
            handle = batch.enter(row.prompt, **row.settings)
        except NoRoomError:
            return False
        except Exception as error:
            if not isinstance(error, InputError):
                logger.exception("a request to %s could not enter the batch", self.name)
            self._fail([row], error)
        else:
            self._running[handle] = row
            row.tell(Event(prompt_tokens=batch.prompt_tokens(handle)))
        return True

    def _hand_out(self, update: Any) -> None:
        row = self._running.get(update.handle)
        if row is None:
            return
        if update.error is not None:
            if not isinstance(update.error, MMSpecError):
                logger.error("a row of %s has failed", self.name, exc_info=update.error)
            del self._running[update.handle]
            self._fail([row], update.error)
            return
        if update.finish_reason is not None:
            del self._running[update.handle]
            self.metrics.count_finished(update.finish_reason, update.output.stats, row.ticket.began)
        row.tell(Event(update.text, update.finish_reason, update.output))

    def _fail(self, rows: Sequence[Row], error: BaseException) -> None:
        for row in rows:
            self.metrics.count_failed()
            row.tell(Event(error=as_request_error(error, row.ticket.names)))
