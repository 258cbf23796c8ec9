"""`mmspec accelerators`: the table of accelerators and acceptance rules, as the README shows it."""

from __future__ import annotations

from dataclasses import asdict

import typer

from mmspec.cli.console import print_json
from mmspec.cli.options import AsJson

__all__ = ["accelerators"]


def accelerators(as_json: AsJson = False) -> None:
    """Print the accelerators and the acceptance rules, with what each promises, as Markdown.

    Example:
        mmspec accelerators
    """
    from mmspec.accelerators import ACCELERATORS, markdown_table

    if as_json:
        presets = ACCELERATORS.items()
        print_json([{"name": name, "exactness": item.exactness, **asdict(item)} for name, item in presets])
    else:
        typer.echo(markdown_table())
