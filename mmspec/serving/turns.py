"""Rows that take turns: each is a call of its own, and a round is one step of every call."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from mmspec.errors import InputError
from mmspec.pipelines.text_stream import TextDeltas
from mmspec.pipelines.vision_language import text_output
from mmspec.serving.text_rules import TextRules

__all__ = ["RowUpdate", "RowsInTurn", "rows_in_turn"]


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


@dataclass(frozen=True)
class RowUpdate:
    """What a round gave to one row: new tokens and text, and at its end the reason and the output."""

    handle: Any
    tokens: list[Any] = field(default_factory=list)
    text: str = ""
    finish_reason: str | None = None
    output: Any = None
    error: Exception | None = None


class RowsInTurn:
    """Rows that enter and leave between rounds; each gives exactly what it gives alone.

    Args:
        pipe: the pipeline, in use by nobody else.
        rows: most rows at a time.
    """

    def __init__(self, pipe: Any, rows: int) -> None:
        self._pipe, self._rows = pipe, rows
        self._handles: list[Handle] = []

    @property
    def free(self) -> int:
        """Places that are left."""
        return self._rows - len(self._handles)

    def enter(self, prompt: Any, rules: TextRules | None = None, **settings: Any) -> Handle:
        """Let a row in; the model reads its prompt in the next round.

        Args:
            prompt: of one row.
            rules: of its text; None for images.
            settings: of the pipeline.

        Raises:
            InputError: no place is left, or an argument of the pipeline cannot be used.
        """
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
        """Tokens of a row's prompt, visual ones included."""
        return handle.prompt_tokens

    def step(self) -> list[RowUpdate]:
        """Take one round of every row; those that ended have left."""
        updates = [self._step(handle) for handle in self._handles]
        ended = {update.handle for update in updates if update.finish_reason or update.error}
        self._handles = [handle for handle in self._handles if handle not in ended]
        return updates

    def cancel(self, handle: Handle) -> None:
        """Take a row out; does nothing if it has left."""
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


@contextmanager
def rows_in_turn(pipe: Any, rows: int) -> Iterator[RowsInTurn]:
    """Hold a pipeline for rows that take turns.

    Raises:
        PipelineBusyError: the pipeline is in use.
    """
    with pipe._busy():
        yield RowsInTurn(pipe, rows)
