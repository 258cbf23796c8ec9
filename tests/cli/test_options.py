"""Command line options in a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import typer
from typer.testing import CliRunner

from mmspec.cli.options import unpack_options


@dataclass(frozen=True, kw_only=True)
class Size:
    names: Annotated[list[str] | None, typer.Option("--name")] = None
    width: Annotated[int, typer.Option(min=1)] = 3
    height: Annotated[int | None, typer.Option(help="Upwards.")] = None


@dataclass(frozen=True, kw_only=True)
class WideSize(Size):
    width: Annotated[int, typer.Option(min=9, help="At least nine.")] = 10
    is_flat: Annotated[bool, typer.Option("--flat")] = False


def test_fields_are_options_and_the_command_gets_the_dataclass():
    called, app = [], typer.Typer()

    @app.command()
    @unpack_options
    def draw(out: str, *, size: WideSize, seed: int = 0) -> None:
        """Draw."""
        called.append((out, size, seed))

    def invoke(*arguments: str) -> tuple[int, str]:
        result = CliRunner().invoke(app, list(arguments))
        return result.exit_code, result.output

    asked = ["x", "--name", "a", "--name", "b", "--height", "7", "--flat", "--seed", "1"]
    assert invoke(*asked) == invoke("x") == (0, "")
    size = WideSize(names=["a", "b"], width=10, height=7, is_flat=True)
    assert called == [("x", size, 1), ("x", WideSize(), 0)]
    assert invoke("x", "--width", "8")[0] == 2, "a derived class says what its options allow"
    code, shown = invoke("--help")
    assert code == 0 and len(called) == 2
    assert all(word in shown for word in ("Draw.", "--name", "At least nine.", "Upwards.", "--flat"))
    assert shown.index("--flat") < shown.index("--seed"), "in the order of the arguments"
