"""The command line: `mmspec caption`, `generate`, `check`, `bench`, `serve`, `train`, `evaluate` and others.

Results go to stdout, progress and complaints to stderr. Exit codes: 0 done, 1 a check failed, 2 wrong usage
or input, 130 interrupted. Torch is imported inside the commands that need it, so `--help` is quick.
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
    """Run commands and exit; one line says what was wrong with the input."""
    from mmspec.errors import MMSpecError

    try:
        app()
    except MMSpecError as error:
        sys.stderr.write(f"error: {' '.join(str(error).split())}\n")
        sys.exit(2)
