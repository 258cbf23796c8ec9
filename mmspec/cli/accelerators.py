"""`mmspec accelerators`: tables of accelerators, their options and acceptance rules."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from mmspec.cli.console import print_result
from mmspec.cli.options import AsJson
from mmspec.open_types import Json

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["accelerators", "stated"]


Name = Annotated[str | None, typer.Argument(help="Accelerator whose options are listed.")]


def accelerators(name: Name = None, as_json: AsJson = False) -> None:
    """List the accelerators and the acceptance rules with their promises, or the options of an accelerator.

    Example:
        mmspec accelerators
        mmspec accelerators sjd
    """
    from mmspec.accelerators import options_of, promise_of
    from mmspec.plugins import METHODS

    if name is not None:
        _print_options(name, as_json)
        return
    rows: list[Json] = [
        {"name": name, "exactness": promise_of(method)[0], "summary": method.summary}
        | {"source": method.source, "needs": method.needs, "options": sorted(options_of(method))}
        for name, method in METHODS.items()
    ]
    print_result(rows, _tables(rows), as_json)


def _print_options(name: str, as_json: bool) -> None:
    """Print the options of an accelerator, then those that every accelerator has."""
    from mmspec.accelerators.meanings import meanings_of, meanings_of_all
    from mmspec.evaluation.tables import figures
    from mmspec.plugins import METHODS

    found = [*meanings_of(METHODS[name]), *meanings_of_all()]
    rows: list[Json] = [
        {key: value.replace("`", "") for key, value in asdict(each).items()} for each in found
    ]
    cells = [tuple(row.values()) for row in rows]
    print_result(rows, figures(("option", "default", "meaning"), cells, words=3), as_json)


def _tables(rows: list[Json]) -> RenderableType:
    """The accelerators and acceptance rules as tables for the terminal."""
    from rich.console import Group

    from mmspec.evaluation.tables import figures
    from mmspec.plugins import RULES

    found = [(row["name"], row["exactness"], row["needs"] or "-", row["summary"]) for row in rows]
    rules = [(name, stated(rule.exactness, rule.bound)) for name, rule in RULES.items()]
    return Group(
        figures(("accelerator", "promise", "needs", "summary"), found, words=4),
        figures(("acceptance=", "promise"), rules, words=2),
    )


def stated(exactness: str, bound: str | None) -> str:
    """A promise with its bound, or with "no bound"."""
    if bound is not None:
        return f"{exactness}: {bound}"
    return exactness if exactness == "exact" else f"{exactness}, no bound"
