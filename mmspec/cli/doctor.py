"""`mmspec doctor`: says what works on this machine, and why the rest does not."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from mmspec.cli.console import print_result
from mmspec.cli.options import AsJson

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["doctor"]


def doctor(as_json: AsJson = False) -> None:
    """Say what works on this machine, and why the rest does not.

    Looks at versions, devices, optional packages, kernels, accelerators and
    reference models; changes nothing.

    Example:
        mmspec doctor
    """
    from mmspec.accelerators import ACCELERATORS
    from mmspec.evaluation.machine import examine
    from mmspec.reference.assets import examine_models

    findings = examine(ACCELERATORS) | {"reference_models": examine_models()}
    print_result(findings, _table(findings), as_json)


def _table(findings: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", show_header=False)
    table.add_row("mmspec", "yes", f"{findings['mmspec']['version']} in {findings['mmspec']['folder']}")
    table.add_row("python", "yes", f"{findings['python']}, {findings['system']}", end_section=True)
    for title, rows in (
        ("package", [_package(one) for one in findings["packages"]]),
        ("optional", [_package(one) for one in findings["optional"]]),
        ("device", [(one["name"], one["ok"], one["detail"]) for one in findings["devices"]]),
        ("kernel", [_kernel(one) for one in findings["kernels"]]),
        ("accelerator", [_accelerator(one) for one in findings["accelerators"]]),
        ("model", [(one["name"], one["ok"], one["detail"]) for one in findings["reference_models"]]),
    ):
        for index, (name, is_ok, detail) in enumerate(rows):
            mark = Text("yes", "green") if is_ok else Text("no", "yellow")
            table.add_row(f"{title} {name}", mark, Text(detail), end_section=index == len(rows) - 1)
    return table


def _package(found: dict[str, Any]) -> tuple[str, bool, str]:
    detail = found["version"] if found["ok"] else f"{found['for']}: {found['remedy']}"
    return found["name"], found["ok"], detail


def _kernel(found: dict[str, Any]) -> tuple[str, bool, str]:
    detail = f"{found['backend']} on {found['device']}: {found['reason']}; {found['summary']}"
    return found["name"], found["ok"], detail


def _accelerator(found: dict[str, Any]) -> tuple[str, bool, str]:
    if not found["ok"]:
        return found["name"], False, found["problem"]
    needs = f"; needs {found['needs']}" if found["needs"] else ""
    return found["name"], True, f"{found['exactness']}; {found['summary']}{needs}"
