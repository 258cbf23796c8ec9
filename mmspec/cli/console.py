"""Output of the commands: results on stdout, notes and progress on stderr, partial results after Ctrl-C."""

from __future__ import annotations

import json
import sys
import time
from typing import TYPE_CHECKING, Any

import typer

if TYPE_CHECKING:
    from rich.console import Console, RenderableType
    from rich.progress import Progress, TaskID

__all__ = ["Interruptible", "note", "print_result", "progress"]

WIDTH_OF_FILES = 160  # without a terminal rich assumes 80 columns, which would cut tables
SECONDS_BETWEEN_LINES = 10.0  # of progress without a terminal


class Interruptible:
    """A block that Ctrl-C ends early; the command prints partial results, then `finish` exits with 130."""

    interrupted = False

    def __enter__(self) -> Interruptible:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> bool:
        self.interrupted = kind is not None and issubclass(kind, KeyboardInterrupt)
        if self.interrupted:
            note("interrupted: these are the results so far")
        return self.interrupted

    def finish(self, code: int = 0) -> None:
        """Exit with 130 after an interruption, else with `code`."""
        if self.interrupted or code:
            raise typer.Exit(130 if self.interrupted else code)


def print_result(value: object, shown: RenderableType, as_json: bool) -> None:
    """Write a result to stdout: its value as JSON, or the table or text in `shown`."""
    if as_json:
        shown = json.dumps(value, indent=2, ensure_ascii=False, default=str)
    if isinstance(shown, str):
        typer.echo(shown)
    else:
        _console(stderr=False).print(shown)


def note(text: str) -> None:
    """Write one line to stderr, dim on a terminal."""
    from rich.text import Text

    _console(stderr=True).print(Text(text, style="dim"), soft_wrap=True)


def progress(*, quiet: bool = False) -> Progress:
    """A progress bar on stderr that is erased at the end; without a terminal, a line every ten seconds."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    class Lines(Progress):
        """Progress as lines of a log."""

        written = time.monotonic()

        def advance(self, task_id: TaskID, advance: float = 1) -> None:
            self.update(task_id, advance=advance)

        def update(self, task_id: TaskID, **changes: Any) -> None:
            super().update(task_id, **changes)
            if time.monotonic() - self.written >= SECONDS_BETWEEN_LINES:
                self.written = time.monotonic()
                task = next(one for one in self.tasks if one.id == task_id)
                total = "" if task.total is None else f" of {task.total:.0f}"
                note(f"{task.description}: {task.completed:.0f}{total}")

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
    )
    console = _console(stderr=True)
    if console.is_terminal or quiet:
        return Progress(*columns, console=console, transient=True, disable=quiet)
    return Lines(*columns, console=console, disable=True)


def _console(stderr: bool) -> Console:
    from rich.console import Console

    stream = sys.stderr if stderr else sys.stdout
    return Console(
        stderr=stderr, width=None if stream.isatty() else WIDTH_OF_FILES, highlight=False, markup=False
    )
