"""`mmspec doctor`: examines this machine, or recommends an accelerator for a model."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mmspec.cli.console import note, print_result
from mmspec.cli.options import AsJson
from mmspec.errors import InputError
from mmspec.open_types import Json

if TYPE_CHECKING:
    from rich.console import RenderableType
    from rich.table import Table

__all__ = ["doctor"]

TITLES = {
    "packages": "Packages",
    "optional": "Optional packages",
    "devices": "Devices",
    "kernels": "Kernels",
    "accelerators": "Accelerators",
    "reference_models": "Reference models",
}


def doctor(
    model: Annotated[str | None, typer.Argument(help="Folder or hub id of a model to examine.")] = None,
    head: Annotated[
        str | None,
        typer.Option(help="Folder of a head to check for the model, and by the list of published heads."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Examine this machine, recommend an accelerator for a model, or check a head for it.

    Without a model, it prints versions, devices, optional packages, kernels,
    accelerators and reference models. With a model, it prints whether mmspec can
    accelerate the model, the memory of a row and of a draft token, a recommended
    accelerator, and the next command. It reads only the config. With --head, it reads
    the head's weights, and names what it cannot read.

    Example:
        mmspec doctor
        mmspec doctor assets/scenes-llava
        mmspec doctor assets/scenes-hybrid --head assets/scenes-hybrid-dspark
    """
    if head is not None:
        if model is None:
            raise InputError("--head", head, "needs a model")
        from mmspec.evaluation.recommendation import examine_head

        checked = examine_head(head, model)
        print_result(checked, _head_table(checked), as_json)
        raise typer.Exit(0 if checked["ok"] else 1)
    note("examining " + (model or "this machine"))
    if model is not None:
        from mmspec.evaluation.machine import examine_model

        found = examine_model(model)
        print_result(found, _model_table(found), as_json)
        raise typer.Exit(0 if found["ok"] else 1)
    from mmspec.assets import examine_models
    from mmspec.evaluation.machine import examine
    from mmspec.plugins import METHODS

    findings = examine(METHODS) | {"reference_models": examine_models()}
    print_result(findings, _tables(findings), as_json)


def _tables(findings: Json) -> RenderableType:
    """A table for each group of findings."""
    from rich.console import Group
    from rich.text import Text

    about = f"mmspec {findings['mmspec']['version']} in {findings['mmspec']['folder']}"
    system = f"Python {findings['python']}, {findings['system']}"
    tables = []
    for group, title in TITLES.items():
        table = _table(title)
        for one in findings[group]:
            mark = Text("yes", "green") if one["ok"] else Text("no", "yellow")
            table.add_row(one["name"], mark, Text(_detail(group, one)))
        tables.append(table)
    return Group(Text(f"{about}\n{system}\n"), *tables)


def _table(title: str | None = None) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False, title=title, title_justify="left")
    table.add_column(no_wrap=True)
    return table


def _detail(group: str, found: Json) -> str:
    """The last column of a finding's row."""
    if group in ("packages", "optional"):
        version = found["version"] if found["ok"] else f"{found['for']}: {found['remedy']}"
        return version + (f", {found['note']}" if "note" in found else "")
    if group == "kernels":
        return f"{found['backend']} on {found['device']}: {found['reason']}; {found['summary']}"
    if group == "accelerators" and found["ok"]:
        needs = f"; needs {found['needs']}" if found["needs"] else ""
        return f"{found['exactness']}; {found['summary']}{needs}"
    return str(found["problem" if group == "accelerators" else "detail"])


def _head_table(found: Json) -> Table:
    table, entry = _table(), found["listed"]
    table.add_row(found["head"], found["problem"] or f"can draft for {found['model']}")
    table.add_row("accelerators", ", ".join(found["accelerators"]) or "none")
    table.add_row("published", "not listed" if entry is None else f"{entry['drafter']} for {entry['target']}")
    return table


def _model_table(found: Json) -> Table:
    table = _table()
    table.add_row(found["name"], "can be accelerated" if found["ok"] else found["problem"])
    if not found["ok"]:
        return table
    if found["layers"]:
        table.add_row("layers", ", ".join(f"{count} {kind}" for kind, count in found["layers"].items()))
        table.add_row("keys and values", f"{found['token_bytes']:,} bytes per token and row")
    else:
        table.add_row("keys and values", "none: the model generates in any order, without a cache")
    for mixer in found["mixers"]:
        how = "in closed form" if mixer["closed_form"] else "token by token"
        sizes = f"{mixer['row_bytes']:,} bytes per row, {mixer['node_bytes']:,} per draft token"
        table.add_row(f"{mixer['count']} {mixer['name']}", f"computes drafts {how}; {sizes}")
    if found["mixers"]:
        sizes = f"{found['row_bytes'] / 1e6:,.2f} MB per row, {found['node_bytes'] / 1e6:,.2f} MB"
        table.add_row("recurrent states", f"{sizes} per draft token and row")
    advice = found["recommended"]
    drafter = f" with {advice['drafter']}" if advice["drafter"] else ""
    table.add_row("recommended", f"{advice['accelerator']}{drafter}: {advice['reason']}")
    if advice["others"]:
        table.add_row("other heads", ", ".join(advice["others"]))
    table.add_row("next command", advice["command"])
    return table
