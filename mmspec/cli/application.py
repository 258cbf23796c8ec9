"""The typer application with all commands; each command has its own module."""

from __future__ import annotations

from typing import Annotated

import typer

from mmspec import __version__
from mmspec.cli.accelerators import accelerators
from mmspec.cli.bench import bench_app
from mmspec.cli.caption import caption
from mmspec.cli.chat import chat
from mmspec.cli.check import check
from mmspec.cli.convert import convert, export
from mmspec.cli.demo import demo_app
from mmspec.cli.doctor import doctor
from mmspec.cli.evaluate import evaluate_app
from mmspec.cli.generate import generate
from mmspec.cli.scenes import scenes
from mmspec.cli.serve import serve
from mmspec.cli.train import train_app
from mmspec.cli.tune import tune

__all__ = ["app"]

app = typer.Typer(
    name="mmspec",
    help="Faster vision-language models and image generators by speculative decoding.",
    epilog="Try, in a clone: mmspec caption assets/images/scene.png --compare",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(asked: bool) -> None:
    if asked:
        typer.echo(f"mmspec {__version__}")
        raise typer.Exit()


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    pass


for command in (caption, chat, generate, check, tune, accelerators, convert, export, doctor, scenes, serve):
    app.command()(command)
app.add_typer(bench_app, name="bench")
app.add_typer(demo_app, name="demo")
app.add_typer(train_app, name="train")
app.add_typer(evaluate_app, name="evaluate")
