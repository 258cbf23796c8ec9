"""Rows of the running batch with their text, and rows decoded in turns for models without a running batch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

from mmspec.errors import InputError
from mmspec.models.adapters import use_adapter
from mmspec.open_types import Keywords
from mmspec.pipelines import SpeechPipeline
from mmspec.pipelines.running_batch import (
    PreparedRequest,
    RowUpdate,
    RunningBatch,
    check_rows_move,
    new_logprobs,
    prepare_request,
)
from mmspec.serving.chat_settings import TextRules
from mmspec.serving.token_entries import Piece, TokenPieces

__all__ = ["Event", "TextRows", "open_rows", "prepare_row", "why_in_turn"]


@dataclass(frozen=True)
class Event:
    """Event of a row. The first event of a row reports that its prompt has been read, or an error.

    Attributes:
        pieces: new text, with entries of its tokens if the request asks for log-probabilities.
        finish_reason: finish reason of the row; None while it is running.
        output: output of the pipeline for a finished row.
        error: error of a failed row.
        prompt_tokens: length of the prompt, visual tokens included, in the first event.
        tokens: number of new tokens.
    """

    pieces: Sequence[Piece] = ()
    finish_reason: str | None = None
    output: Any = None
    error: BaseException | None = None
    prompt_tokens: int = 0
    tokens: int = 0


class TextRows:
    """Requests of one row each in a `RunningBatch` or in `Turns`, with text instead of tokens."""

    def __init__(self, batch: Any) -> None:
        self._batch = batch
        self._texts: dict[Hashable, TokenPieces] = {}
        self._first: dict[Hashable, Event] = {}  # of rows that have had no event

    @property
    def free(self) -> int:
        """Number of free rows."""
        return int(self._batch.free)

    def enter(
        self,
        prompt: Any,
        rules: TextRules | None = None,
        prepared: PreparedRequest | None = None,
        **settings: Any,
    ) -> tuple[Hashable, int]:
        """Enter a row into the batch; return its handle and the length of its prompt.

        Args:
            prompt: prompt of the row.
            rules: of its text; None for rows without text.
            prepared: result of `prepare_row`; None to prepare the row now.
            settings: arguments of the pipeline.

        Raises:
            InputError: an argument of the pipeline cannot be used.
            NoRoomError: the row cannot be decoded together with those in the batch.
        """
        batch = self._batch
        if prepared is None:
            handle = batch.enter(prompt, **with_rules(batch.pipe, rules, settings))
        else:
            handle = batch.enter_prepared(prepared)
        if rules is not None:
            self._texts[handle] = rules.pieces(batch.pipe, batch.text_before(handle))
        tokens = batch.prompt_tokens(handle)
        self._first[handle] = Event(prompt_tokens=tokens)
        return handle, tokens

    def step(self) -> list[tuple[Hashable, Event]]:
        """Decode one round; return handles and events. Finished rows have left the batch."""
        return [(update.handle, event) for update in self._batch.step() for event in self._events(update)]

    def capture(self) -> None:
        """Capture the graphs of a compiled pipeline before the first row enters."""
        if isinstance(self._batch, RunningBatch):
            self._batch.capture()

    def cancel(self, handle: Hashable) -> None:
        """Cancel a row."""
        self._batch.cancel(handle)
        self._texts.pop(handle, None)
        self._first.pop(handle, None)

    def _events(self, update: RowUpdate) -> list[Event]:
        first, event = self._first.pop(update.handle, None), self._event(update)
        return [event] if first is None or event.error is not None else [first, event]

    def _event(self, update: RowUpdate) -> Event:
        if update.error is not None:
            self._texts.pop(update.handle, None)
            return Event(error=update.error)
        text = self._texts.get(update.handle)
        pieces = [] if text is None else text.add(update.tokens[0], update.logprobs[0])
        count = len(update.tokens[0])
        if update.output is None:
            return Event(pieces, tokens=count)
        if text is not None:
            pieces += self._texts.pop(update.handle).finish()
        return Event(pieces, update.output.finish_reasons[0], update.output, tokens=count)


def with_rules(pipe: Any, rules: TextRules | None, settings: Keywords) -> Keywords:
    """The arguments of a pipeline for a row with these rules of its text."""
    return settings if rules is None else {**settings, **rules.settings(pipe)}


def prepare_row(pipe: Any, prompt: Any, rules: TextRules | None = None, **settings: Any) -> PreparedRequest:
    """Prepare a row of text for a running batch, in any thread; the arguments are those of `enter`."""
    return prepare_request(pipe, prompt, with_rules(pipe, rules, settings))


@dataclass(eq=False)
class Turn:
    """One row in `Turns`: its call, the rounds of the call, and the function for its output."""

    call: Any
    rounds: Iterator[Any]
    make_output: Callable[[Any], Any]


class Turns:
    """Rows decoded in turns, with the methods of `RunningBatch`: a round is one step of each row's own call.

    The output of each row is that of a call of its own.
    """

    def __init__(self, pipe: Any, rows: int) -> None:
        self.pipe, self._rows = pipe, rows
        self._turns: dict[int, Turn] = {}
        self._count = 0

    @property
    def free(self) -> int:
        return self._rows - len(self._turns)

    def enter(self, prompt: Any, **settings: Any) -> int:
        call, make_output = self.pipe._prepare_request(prompt, settings)
        self._count += 1
        self._turns[self._count] = Turn(call, call.rounds(), make_output)
        return self._count

    def prompt_tokens(self, handle: int) -> int:
        return int(self._turns[handle].call.canvas.prompt_lengths[0])

    def text_before(self, handle: int) -> list[int]:
        return list(self._turns[handle].call.requests[0].text_before)

    def step(self) -> list[RowUpdate]:
        updates = [self._step(handle, turn) for handle, turn in self._turns.items()]
        for update in updates:
            if update.output is not None or update.error is not None:
                del self._turns[update.handle]
        return updates

    def cancel(self, handle: int) -> None:
        del self._turns[handle]

    def _step(self, handle: int, turn: Turn) -> RowUpdate:
        canvas = turn.call.canvas
        try:
            step = next(turn.rounds, None)
            tokens = [[]] if step is None else step.emission.tokens
            if step is not None and canvas.finish_reasons[0] is None:
                return RowUpdate(handle, tokens, logprobs=new_logprobs(canvas, [0], tokens))
            output = turn.make_output(canvas)
        except Exception as error:  # an error of this row alone
            failed: Any = error
            return RowUpdate(handle, [[]], error=failed)
        return RowUpdate(handle, tokens, output, canvas.errors[0], new_logprobs(canvas, [0], tokens))


class WholeCalls:
    """Requests that are whole calls of a pipeline, one in each round, with the methods of `TextRows`.

    The first event of a request comes when its call has ended.
    """

    def __init__(self, pipe: Any, rows: int) -> None:
        self._pipe, self._rows = pipe, rows
        self._calls: dict[int, tuple[Any, Keywords]] = {}  # in order of arrival
        self._count = 0

    @property
    def free(self) -> int:
        return self._rows - len(self._calls)

    def enter(self, prompt: Any, /, **settings: Any) -> tuple[int, int]:
        self._count += 1  # `settings` of a transcript may have a prompt too
        self._calls[self._count] = prompt, settings
        return self._count, 0

    def step(self) -> list[tuple[int, Event]]:
        handle = next(iter(self._calls))
        prompt, settings = self._calls.pop(handle)
        try:
            output = self._pipe(prompt, **settings)
        except Exception as error:  # an error of this request alone
            return [(handle, Event(error=error))]
        count = sum(output.stats.new_tokens)
        return [(handle, Event()), (handle, Event((), "eos", output, tokens=count))]

    def capture(self) -> None:
        """Do nothing: calls of a pipeline capture their own graphs."""

    def cancel(self, handle: Any) -> None:
        del self._calls[handle]


class AdapterBatches:
    """Running batches over the same weights, one for each adapter, with the methods of `RunningBatch`.

    A forward pass has one adapter. A round is therefore one of a single batch, and the batches take turns.

    Args:
        pipe: the pipeline, which is locked.
        open_batch: opens a batch of the pipeline.
        rows: largest number of rows of all batches.
    """

    def __init__(self, pipe: Any, open_batch: Callable[[], Any], rows: int) -> None:
        self.pipe, self._open_batch, self._rows = pipe, open_batch, rows
        self._batches: dict[str | None, Any] = {}  # those that have waited longest first
        self._handles: dict[tuple[str | None, int], Any] = {}  # batch of each row

    @property
    def free(self) -> int:
        return self._rows - len(self._handles)

    def enter(self, prompt: Any, adapter: str | None = None, **settings: Any) -> tuple[str | None, int]:
        if adapter not in self._batches:
            self._batches[adapter] = self._open_batch()
        batch = self._batches[adapter]
        use_adapter(self.pipe.model, adapter)
        handle = adapter, batch.enter(prompt, **settings)
        self._handles[handle] = batch
        return handle

    def prompt_tokens(self, handle: tuple[str | None, int]) -> int:
        return int(self._handles[handle].prompt_tokens(handle[1]))

    def text_before(self, handle: tuple[str | None, int]) -> list[int]:
        return list(self._handles[handle].text_before(handle[1]))

    def step(self) -> list[RowUpdate]:
        running = {adapter for adapter, _ in self._handles}
        adapter = next(one for one in self._batches if one in running)
        batch = self._batches[adapter] = self._batches.pop(adapter)
        use_adapter(self.pipe.model, adapter)
        try:
            updates = [replace(update, handle=(adapter, update.handle)) for update in batch.step()]
        except Exception as error:  # rows in turn end alone; other batches fail whole, without the others
            self._batches.pop(adapter).close()
            gone: list[Any] = [handle for handle in self._handles if handle[0] == adapter]
            updates = [RowUpdate(handle, [[]], error=error) for handle in gone]
        for update in updates:
            if update.output is not None or update.error is not None:
                del self._handles[update.handle]
        return updates

    def cancel(self, handle: tuple[str | None, int]) -> None:
        self._handles.pop(handle).cancel(handle[1])


def why_in_turn(pipe: Any) -> str | None:
    """Return the reason why the rows of a pipeline are decoded in turns; None if they share a batch."""
    if isinstance(pipe, SpeechPipeline):
        return "recordings are transcribed one after another"
    try:
        check_rows_move(pipe)
    except InputError as error:
        return str(error)
    return None


@contextmanager
def open_rows(pipe: Any, rows: int, has_adapters: bool = False) -> Iterator[TextRows | WholeCalls]:
    """Open a pipeline for rows that enter and leave.

    Args:
        pipe: the pipeline.
        rows: largest number of rows that are decoded together.
        has_adapters: whether rows have a setting `adapter`: the name of one, or None for the base model.

    Raises:
        PipelineBusyError: another call is running.
    """
    if isinstance(pipe, SpeechPipeline):
        yield WholeCalls(pipe, rows)
        return
    moves = why_in_turn(pipe) is None
    if moves and not has_adapters:
        with pipe.running_batch(rows=rows) as batch:
            yield TextRows(batch)
        return
    with pipe._busy(), ExitStack() as batches:
        if not has_adapters:
            yield TextRows(Turns(pipe, rows))
            return

        def open_batch() -> Any:
            if not moves:
                return Turns(pipe, rows)
            return batches.enter_context(RunningBatch(pipe, rows, is_locked=True))

        try:
            yield TextRows(AdapterBatches(pipe, open_batch, rows))
        finally:
            use_adapter(pipe.model, None)
