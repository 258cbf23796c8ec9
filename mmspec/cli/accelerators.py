"""`mmspec accelerators`: the table of accelerators and acceptance rules, as the README shows it."""

from __future__ import annotations

import typer

__all__ = ["accelerators"]


def accelerators() -> None:
    """Print the accelerators and the acceptance rules, with what each promises, as a Markdown table.

    Example:
        mmspec accelerators
    """
    from mmspec.accelerators import markdown_table

    typer.echo(markdown_table())
