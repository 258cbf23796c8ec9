"""Start and stop buttons of the demos; the model serves one visitor at a time, and others queue."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence

import gradio as gr

from mmspec.errors import MMSpecError
from mmspec.open_types import AnyFunction, Keywords

__all__ = ["MESSAGED", "QUICK", "Stops", "connect"]


class Stops:
    """Stop flags by session. The click makes a new flag, so that queued work can be stopped too."""

    def __init__(self) -> None:
        self._flags: dict[str, threading.Event] = {}

    def begin(self, request: gr.Request) -> None:
        """Make a new flag for a visitor's session."""
        self._flags[request.session_hash or ""] = threading.Event()

    def flag(self, request: gr.Request) -> threading.Event:
        """The flag of the session's latest work."""
        return self._flags.setdefault(request.session_hash or "", threading.Event())

    def stop(self, request: gr.Request) -> None:
        """Stop the session's latest work, if there is any."""
        if flag := self._flags.get(request.session_hash or ""):
            flag.set()

    def leave(self, request: gr.Request) -> None:
        """Stop the session's latest work and drop its flag."""
        self.stop(request)
        self._flags.pop(request.session_hash or "", None)


PRIVATE: Keywords = {"api_visibility": "private"}
#: Keywords of events that may show a message; Gradio allows this only for queued events.
MESSAGED: Keywords = {**PRIVATE, "show_progress": "hidden"}
#: Keywords of events that do not use the model and skip the queue.
QUICK: Keywords = {**PRIVATE, "queue": False, "show_progress": "hidden"}


def connect(
    stops: Stops,
    triggers: Sequence[AnyFunction],
    work: Callable[..., Iterator[object]],
    inputs: Sequence[gr.components.Component],
    outputs: Sequence[gr.components.Component],
    buttons: tuple[gr.Button, gr.Button],
    others: Sequence[gr.Button] = (),
    *,
    preprocess: bool = True,
) -> None:
    """Connect events to work on the model; a stop button replaces the start button while it runs.

    Args:
        stops: flags of the page's visitors.
        triggers: events that start the work.
        work: a generator function of the values of `inputs`, and of the visitor's flag as its last argument.
        inputs, outputs: components.
        buttons: the start button and the stop button.
        others: buttons that are disabled while the work runs.
        preprocess: whether Gradio converts the inputs; False passes uploads as they were sent.
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
        if flag.is_set():  # stopped while it was queued
            yield [gr.skip()] * len(outputs)
            return
        try:
            yield from work(*values, flag)
        except MMSpecError as error:
            raise gr.Error(str(error), title="Invalid request", print_exception=False) from error

    changed = [run, stop, *others]
    line: Keywords = {"concurrency_limit": 1, "concurrency_id": "model", **PRIVATE}
    for trigger in triggers:
        began = trigger(begin, None, changed, **QUICK)
        done = began.then(do, inputs, outputs, show_progress="minimal", preprocess=preprocess, **line)
        for outcome in (done.success, done.failure):  # `then` does not run after a failure
            outcome(lambda: buttons_while(False), None, changed, **QUICK)
    stop.click(stops.stop, None, None, **QUICK)
