"""The typer application with all commands; each command has its own module."""

from __future__ import annotations

from typing import Annotated, Any

import typer
from typer.core import TyperGroup

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
from mmspec.cli.help_text import Command
from mmspec.cli.scenes import scenes
from mmspec.cli.serve import serve
from mmspec.cli.train import train_app
from mmspec.cli.transcribe import transcribe
from mmspec.cli.tune import tune

__all__ = ["app"]

try:
    from typer._click.exceptions import NoSuchOption
except ImportError:  # an older typer, which does not contain click
    from click.exceptions import NoSuchOption  # type: ignore[assignment]

#: Options that other tools have, with those of the same meaning here.
ELSEWHERE = {
    "--model": ("--target",),
    "--n": ("--num-images-per-prompt", "--samples"),
    "--num-prompts": ("--samples",),
    "--limit": ("--samples",),
    "--guidance": ("--guidance-scale",),
    "--steps": ("--num-inference-steps",),
    "--max-tokens": ("--max-new-tokens",),
    "--speculative-model": ("--drafter",),
    "--compare": ("--accelerator",),
}


class Commands(TyperGroup):
    """The commands; the error for an unknown option names the one that was meant."""

    def invoke(self, ctx: Any) -> Any:
        """Run a command."""
        try:
            return super().invoke(ctx)
        except NoSuchOption as error:
            context = error.ctx or ctx
            known = {name for one in context.command.params for name in one.opts}
            if error.option_name == "--model" and known & {"model", "models"}:
                error.message += f"; the model is the first argument: {context.command_path} MODEL"
                error.possibilities = None
            elif same := [name for name in ELSEWHERE.get(error.option_name, ()) if name in known]:
                error.possibilities = same
            raise


app = typer.Typer(
    name="mmspec",
    cls=Commands,
    help="Faster vision-language models and image generators by speculative decoding.",
    epilog="Try, in a clone: mmspec caption assets/scenes-llava assets/images/scene.png --compare",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # tables of options are unreadable in 80 columns
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


for command in (
    *(caption, chat, transcribe, generate, check, tune, accelerators, convert, export, doctor, scenes, serve),
):
    app.command(cls=Command)(command)
app.add_typer(bench_app, name="bench")
app.add_typer(demo_app, name="demo")
app.add_typer(train_app, name="train")
app.add_typer(evaluate_app, name="evaluate")
