"""`mmspec evaluate`: scores of models, and tables of drafters and methods."""

from __future__ import annotations

import typer

from mmspec.cli.evaluate_drafters import drafters
from mmspec.cli.evaluate_growth import growth
from mmspec.cli.evaluate_images import images
from mmspec.cli.evaluate_methods import methods
from mmspec.cli.evaluate_text import text

__all__ = ["evaluate_app"]

evaluate_app = typer.Typer(help="Score models.", no_args_is_help=True)


@evaluate_app.callback()
def _group() -> None:
    """Score models."""


evaluate_app.command()(methods)
evaluate_app.command()(drafters)
evaluate_app.command()(growth)
evaluate_app.command()(images)
evaluate_app.command()(text)
