"""Tables of figures for people."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from rich import box
from rich.table import Table

__all__ = ["figures"]


def figures(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, **settings: Any
) -> Table:
    """A table of figures.

    Args:
        columns: their headers.
        rows: the cells.
        words: how many of the first columns hold words, which begin at the left.
        settings: of rich's Table, such as its title.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", **settings)
    for index, column in enumerate(columns):
        if index < words:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
