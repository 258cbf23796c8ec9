"""The command line: `mmspec caption`, `generate`, `check`, `bench`, `serve`, `train`, `evaluate` and others.

Results go to stdout, progress and errors to stderr. Exit codes: 0 success, 1 failed check, 2 invalid input,
130 interrupted. Commands import torch inside their functions, so that `--help` is fast.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import typer

__all__ = ["main", "run"]


def main() -> None:
    """Run the command line and exit."""
    from mmspec.cli.application import app

    run(app)


def run(app: typer.Typer) -> None:
    """Run the commands and exit; invalid input gives one line on stderr."""
    from mmspec.errors import MMSpecError

    try:
        app()
    except MMSpecError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
