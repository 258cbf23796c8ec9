"""Rows of a running batch with their text; rows that take turns, where a batch cannot let them in and out."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mmspec.errors import InputError
from mmspec.pipelines.running_batch import RunningBatch, check_rows_move
from mmspec.pipelines.text_stream import TextDeltas
from mmspec.pipelines.vision_language import text_output
from mmspec.serving.chat_settings import TextRules

__all__ = ["BatchedRows", "RowUpdate", "RowsInTurn", "open_rows", "why_in_turn"]


@dataclass(frozen=True)
class RowUpdate:
    """The new tokens and text of one row after a round, and at its end the reason and the output."""

    handle: Any
    tokens: list[Any] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    output: Any = None
    error: Exception | None = None


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


@dataclass(eq=False)
class Handle:
    """One row at work.

    Attributes:
        prompt_tokens: of its prompt, visual tokens included; 0 where it has none.
    """

    call: Any
    rounds: Iterator[Any]
    deltas: TextDeltas | None
    prompt_tokens: int = 0


class RowsInTurn:
    """Rows that take turns: each is a call of its own, and a round is one step of every call.

    They enter and leave between rounds, by the methods of `BatchedRows`; each gives exactly what it gives
    alone.

    Args:
        pipe: the pipeline, in use by nobody else.
        rows: most rows at a time.
    """

    def __init__(self, pipe: Any, rows: int) -> None:
        self._pipe, self._rows = pipe, rows
        self._handles: list[Handle] = []

    @property
    def free(self) -> int:
        return self._rows - len(self._handles)

    def enter(self, prompt: Any, rules: TextRules | None = None, **settings: Any) -> Handle:
        if not self.free:
            raise InputError("rows", self._rows + 1, f"at most {self._rows} at a time")
        pipe = self._pipe
        if rules is None:
            what = {"negative_prompt": settings.pop("negative_prompt", None)}
            call = pipe.prepare(prompt, settings, class_labels=None, height=None, width=None, **what)
            handle = Handle(call, call.rounds(), None)
        else:
            call, _ = pipe._prepare_request(prompt, {**settings, **rules.settings(pipe)})
            (row,) = call.requests
            deltas = rules.deltas(pipe, row.text_before)
            handle = Handle(call, call.rounds(), deltas, len(row.prompt_tokens))
        self._handles.append(handle)
        return handle

    def prompt_tokens(self, handle: Handle) -> int:
        return handle.prompt_tokens

    def step(self) -> list[RowUpdate]:
        updates = [self._step(handle) for handle in self._handles]
        ended = {update.handle for update in updates if update.finish_reason or update.error}
        self._handles = [handle for handle in self._handles if handle not in ended]
        return updates

    def cancel(self, handle: Handle) -> None:
        if handle in self._handles:
            self._handles.remove(handle)

    def _step(self, handle: Handle) -> RowUpdate:
        try:
            step = next(handle.rounds, None)
            tokens = [] if step is None else list(step.emission.tokens[0])
            text = "" if handle.deltas is None else handle.deltas.add(tokens)
            if step is not None and not self._has_ended(handle):
                return RowUpdate(handle, tokens, text)
            handle.rounds = iter(())
            output = self._output(handle)
        except Exception as error:  # of this row alone
            return RowUpdate(handle, error=error)
        text += "" if handle.deltas is None else handle.deltas.finish()
        return RowUpdate(handle, tokens, text, output.finish_reasons[0], output)

    def _has_ended(self, handle: Handle) -> bool:
        calls = handle.call.calls if handle.deltas is None else [handle.call]
        return all(call.canvas.finish_reasons[0] is not None for call in calls)

    def _output(self, handle: Handle) -> Any:
        if handle.deltas is None:
            for _, error in handle.call.errors():
                raise error
            return handle.call.output()
        for error in handle.call.canvas.errors:
            if error is not None:
                raise error
        return text_output(handle.call, self._pipe.tokenizer)


def why_in_turn(pipe: Any) -> str | None:
    """The reason why the rows of a pipeline take turns; None if they are decoded together."""
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
        with pipe._busy():
            yield RowsInTurn(pipe, rows)
        return
    with pipe.running_batch(rows=rows) as batch:
        yield BatchedRows(batch)
