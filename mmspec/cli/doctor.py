"""`mmspec doctor`: says what works on this machine, and why the rest does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from mmspec.cli.console import print_result
from mmspec.cli.options import AsJson
from mmspec.open_types import Json

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["doctor"]


def doctor(
    model: Annotated[
        str | None, typer.Argument(help="Folder or hub id: look at this model, by its config.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Say what works on this machine, and why the rest does not.

    Looks at versions, devices, optional packages, kernels, accelerators and
    reference models; changes nothing. Of a model it says whether it can be
    accelerated, and how much memory a row and a drafted token take.

    Example:
        mmspec doctor
        mmspec doctor assets/scenes-llava
    """
    if model is not None:
        from mmspec.evaluation.machine import examine_model

        found = examine_model(model)
        print_result(found, _model_table(found), as_json)
        raise typer.Exit(0 if found["ok"] else 1)
    from mmspec.assets import examine_models
    from mmspec.evaluation.machine import examine
    from mmspec.plugins import METHODS

    findings = examine(METHODS) | {"reference_models": examine_models()}
    print_result(findings, _table(findings), as_json)


def _table(findings: Json) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", show_header=False)
    table.add_row("mmspec", "yes", f"{findings['mmspec']['version']} in {findings['mmspec']['folder']}")
    table.add_row("python", "yes", f"{findings['python']}, {findings['system']}", end_section=True)
    for title, rows in (
        ("package", findings["packages"]),
        ("optional", findings["optional"]),
        ("device", findings["devices"]),
        ("kernel", findings["kernels"]),
        ("accelerator", findings["accelerators"]),
        ("model", findings["reference_models"]),
    ):
        for one in rows:
            mark = Text("yes", "green") if one["ok"] else Text("no", "yellow")
            row = f"{title} {one['name']}", mark, Text(_detail(title, one))
            table.add_row(*row, end_section=one is rows[-1])
    return table


def _detail(title: str, found: Json) -> str:
    """Words about a finding, by the kind of it."""
    if title in ("package", "optional"):
        said = found["version"] if found["ok"] else f"{found['for']}: {found['remedy']}"
        return said + (f", {found['note']}" if "note" in found else "")
    if title == "kernel":
        return f"{found['backend']} on {found['device']}: {found['reason']}; {found['summary']}"
    if title == "accelerator" and found["ok"]:
        needs = f"; needs {found['needs']}" if found["needs"] else ""
        return f"{found['exactness']}; {found['summary']}{needs}"
    return str(found["problem" if title == "accelerator" else "detail"])


def _model_table(found: Json) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_header=False)
    table.add_row(found["name"], "can be accelerated" if found["ok"] else found["problem"])
    if not found["ok"]:
        return table
    if not found["layers"]:
        table.add_row("keys and values", "none: it draws in any order, and reads all that is drawn anew")
        return table
    table.add_row("layers", ", ".join(f"{count} {kind}" for kind, count in found["layers"].items()))
    table.add_row("keys and values", f"{found['token_bytes']:,} bytes a token and row")
    for mixer in found["mixers"]:
        how = "in closed form" if mixer["closed_form"] else "token by token"
        sizes = f"{mixer['row_bytes']:,} bytes a row, {mixer['node_bytes']:,} a drafted token"
        table.add_row(f"{mixer['count']} {mixer['name']}", f"drafts are computed {how}; {sizes}")
    if found["mixers"]:
        sizes = f"{found['row_bytes'] / 1e6:,.2f} MB a row, {found['node_bytes'] / 1e6:,.2f} MB"
        table.add_row("recurrent states", f"{sizes} a drafted token of a row")
    return table
