"""Options that a command takes as a dataclass."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated

import pytest
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


@pytest.fixture
def invoke():
    """Run a command that takes a `WideSize`; its exit code, its output and what it was called with."""
    called = []

    @unpack_options
    def draw(out: str, *, size: WideSize, seed: int = 0) -> None:
        """Draw."""
        called.append((out, size, seed))

    app = typer.Typer()
    app.command()(draw)

    def run(*arguments: str):
        result = CliRunner().invoke(app, list(arguments))
        return result.exit_code, result.output, called

    return run


def test_fields_are_options_and_the_command_gets_the_dataclass(invoke):
    asked = ["x", "--name", "a", "--name", "b", "--height", "7", "--flat", "--seed", "1"]
    size = WideSize(names=["a", "b"], width=10, height=7, is_flat=True)
    assert invoke(*asked) == (0, "", [("x", size, 1)])


def test_defaults_are_those_of_the_dataclass(invoke):
    assert invoke("x") == (0, "", [("x", WideSize(), 0)])


def test_a_derived_class_says_what_its_options_allow(invoke):
    code, _, called = invoke("x", "--width", "8")
    assert (code, called) == (2, [])


def test_the_help_has_the_words_of_the_command_and_of_all_options(invoke):
    code, shown, _ = invoke("--help")
    assert code == 0
    for word in ("Draw.", "--name", "At least nine.", "Upwards.", "--flat", "--seed"):
        assert word in shown
    assert shown.index("--flat") < shown.index("--seed"), "in the order of the arguments"
