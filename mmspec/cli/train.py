"""`mmspec train`: the reference models, made again or anew."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from mmspec.cli.console import note, print_json
from mmspec.cli.options import AsJson

__all__ = ["train_app"]

train_app = typer.Typer(help="Train models.", no_args_is_help=True)


@train_app.callback()
def _group() -> None:
    """Train models; several GPUs through `accelerate launch -m mmspec train ...`."""


@train_app.command()
def vlm(
    out: Annotated[Path, typer.Option(help="Folder to write.")],
    size: Annotated[str, typer.Option(help="base, small (the draft model) or tiny.")] = "base",
    minutes: Annotated[
        float | None, typer.Option(min=0.0, help="Length of the training.", show_default="56")
    ] = None,
    steps: Annotated[
        int | None,
        typer.Option(min=1, help="Length in steps instead; reproducible.", show_default=False),
    ] = None,
    tower_from: Annotated[
        Path | None,
        typer.Option(help="Trained folder whose vision tower is taken over and frozen.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Scenes a step and process.")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights and scenes.")] = 0,
    threads: Annotated[
        int | None, typer.Option(min=1, help="CPU threads; torch's choice if not given.", show_default=False)
    ] = None,
    resume: Annotated[bool, typer.Option("--resume", help="Go on from an interrupted run.")] = False,
    as_json: AsJson = False,
) -> None:
    """Train a reference vision-language model on scenes.

    Resumable; writes an ordinary transformers folder.

    Example:
        mmspec train vlm --out my-scenes-llava --minutes 40
        mmspec train vlm --out my-scenes-llava --minutes 40 --resume
    """
    from mmspec.training.vlm import train_vlm

    folder = train_vlm(
        out,
        size=size,
        minutes=minutes,
        steps=steps,
        tower_from=tower_from,
        batch_size=batch_size,
        seed=seed,
        threads=threads,
        resume=resume,
    )
    if as_json:
        print_json({"folder": str(folder), "size": size, "seed": seed})
    else:
        typer.echo(str(folder))
        note(f"score it: mmspec evaluate vlm {folder}")
