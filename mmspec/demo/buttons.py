"""Buttons that begin work on the model and stop it; one visitor's work at a time, others wait in line."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import gradio as gr

from mmspec.errors import MMSpecError
from mmspec.open_types import AnyFunction, Keywords

__all__ = ["MESSAGED", "QUICK", "Stops", "connect"]


class Stops:
    """Flags by session. One is fresh from the click that begins, so that waiting work can be stopped too."""

    def __init__(self) -> None:
        self._flags: dict[str, threading.Event] = {}

    def begin(self, request: gr.Request) -> None:
        """Give a visitor's session a fresh flag."""
        self._flags[request.session_hash or ""] = threading.Event()

    def flag(self, request: gr.Request) -> threading.Event:
        """The flag of what the session began last."""
        return self._flags.setdefault(request.session_hash or "", threading.Event())

    def stop(self, request: gr.Request) -> None:
        """Stop what the session began last; nothing if there is none."""
        if flag := self._flags.get(request.session_hash or ""):
            flag.set()

    def leave(self, request: gr.Request) -> None:
        """Stop what the session began last, and forget the session."""
        self.stop(request)
        self._flags.pop(request.session_hash or "", None)


PRIVATE: Keywords = {"api_visibility": "private"}
#: Keywords of events that may end in a message to the visitor, which only queued ones can send.
MESSAGED: Keywords = {**PRIVATE, "show_progress": "hidden"}
#: Keywords of events that do not touch the model, and so need not wait in line.
QUICK: Keywords = {**PRIVATE, "queue": False, "show_progress": "hidden"}


def connect(
    stops: Stops,
    triggers: Sequence[AnyFunction],
    work: Callable[..., Iterator[object]],
    inputs: Sequence[gr.components.Component],
    outputs: Sequence[gr.components.Component],
    buttons: tuple[gr.Button, gr.Button],
    others: Sequence[gr.Button] = (),
) -> None:
    """Connect events to work on the model, during which a stop button stands in the place of another.

    Args:
        stops: flags of the page's visitors.
        triggers: events that begin.
        work: a generator function; gets the values of `inputs`, and the visitor's flag as its last argument.
        inputs, outputs: components.
        buttons: the one that begins, and the one that stops.
        others: buttons that cannot be used meanwhile.
    """
    run, stop = buttons

    def buttons_while(running: bool) -> list[gr.Button]:
        found = [gr.Button(visible=not running), gr.Button(visible=running)]
        return found + [gr.Button(interactive=not running)] * len(others)

    def begin(request: gr.Request) -> list[gr.Button]:
        stops.begin(request)
        return buttons_while(True)

    def do(request: gr.Request, *values: object) -> Iterator[object]:
        flag = stops.flag(request)
        if flag.is_set():  # while it waited in line
            yield [gr.skip()] * len(outputs)
            return
        try:
            yield from work(*values, flag)
        except MMSpecError as error:
            raise gr.Error(str(error), title="That did not work", print_exception=False) from error

    changed = [run, stop, *others]
    line: Keywords = {"concurrency_limit": 1, "concurrency_id": "model", **PRIVATE}
    for trigger in triggers:
        began = trigger(begin, None, changed, **QUICK)
        done = began.then(do, inputs, outputs, show_progress="minimal", **line)
        for outcome in (done.success, done.failure):  # `then` does not follow a failure
            outcome(lambda: buttons_while(False), None, changed, **QUICK)
    stop.click(stops.stop, None, None, **QUICK)
