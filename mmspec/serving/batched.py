"""Rows of a running batch with their text; rows that take turns, where a batch cannot let them in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from mmspec.errors import InputError
from mmspec.pipelines.running_batch import RunningBatch, check_rows_move
from mmspec.pipelines.text_stream import TextDeltas
from mmspec.serving.text_rules import TextRules
from mmspec.serving.turns import RowUpdate, rows_in_turn

__all__ = ["BatchedRows", "open_rows", "why_in_turn"]


class BatchedRows:
    """Requests of one row each in a running batch, with new text beside new tokens.

    Args:
        batch: open.
    """

    def __init__(self, batch: RunningBatch) -> None:
        self._batch = batch
        self._deltas: dict[int, TextDeltas] = {}

    @property
    def free(self) -> int:
        """Places that are left."""
        return self._batch.free

    def enter(self, prompt: Any, rules: TextRules | None = None, **settings: Any) -> int:
        """Read a prompt and let its row in.

        Args:
            prompt: of one row.
            rules: of its text; None for images.
            settings: of the pipeline.

        Raises:
            InputError: an argument of the pipeline cannot be used.
            NoRoomError: it cannot be decoded together with those in the batch.
        """
        if rules is None:
            return self._batch.enter(prompt, **settings)
        pipe = self._batch.pipe
        handle = self._batch.enter(prompt, **settings, **rules.settings(pipe))
        self._deltas[handle] = rules.deltas(pipe, self._batch.text_before(handle))
        return handle

    def prompt_tokens(self, handle: int) -> int:
        """Tokens of a row's prompt, visual ones included."""
        return self._batch.prompt_tokens(handle)

    def step(self) -> list[RowUpdate]:
        """Take one round; rows that ended have left."""
        return [self._with_text(update) for update in self._batch.step()]

    def cancel(self, handle: int) -> None:
        """Take a row out."""
        self._batch.cancel(handle)
        self._deltas.pop(handle, None)

    def _with_text(self, update: Any) -> RowUpdate:
        (tokens,) = update.tokens
        deltas = self._deltas.get(update.handle)
        text = "" if deltas is None else deltas.add(tokens)
        if update.error is not None:
            self._deltas.pop(update.handle, None)
            return RowUpdate(update.handle, error=update.error)
        if update.output is None:
            return RowUpdate(update.handle, tokens, text)
        if deltas is not None:
            text += deltas.finish()
            del self._deltas[update.handle]
        return RowUpdate(update.handle, tokens, text, update.output.finish_reasons[0], update.output)


def why_in_turn(pipe: Any) -> str | None:
    """Why the rows of a pipeline take turns; None if they are decoded together."""
    try:
        check_rows_move(pipe)
    except InputError as error:
        return str(error)
    return None


@contextmanager
def open_rows(pipe: Any, rows: int) -> Iterator[Any]:
    """Hold a pipeline for rows that enter and leave.

    Raises:
        PipelineBusyError: the pipeline is in use.
    """
    if why_in_turn(pipe) is not None:
        with rows_in_turn(pipe, rows) as turns:
            yield turns
        return
    with pipe.running_batch(rows=rows) as batch:
        yield BatchedRows(batch)
