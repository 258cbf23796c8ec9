"""`mmspec evaluate`: how often a model is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import print_json, show
from mmspec.cli.methods import methods
from mmspec.cli.options import AsJson, Model

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["evaluate_app"]

evaluate_app = typer.Typer(help="Score models.", no_args_is_help=True)


@evaluate_app.callback()
def _group() -> None:
    """Score models."""


@evaluate_app.command()
def vlm(
    model: Model = None,
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes to ask about.")] = 500,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the first scene.", show_default="10000")
    ] = None,
    descriptions: Annotated[bool, typer.Option(help="Ask for long descriptions too (slow).")] = True,
    batch_size: Annotated[int, typer.Option(min=1, help="Prompts in one call of generate.")] = 50,
    card: Annotated[bool, typer.Option("--card", help="Write the model card with the figures.")] = False,
    as_json: AsJson = False,
) -> None:
    """Score a vision-language model on held-out scenes.

    Every caption, answer and description is either right or wrong.

    Example:
        mmspec evaluate vlm assets/scenes-llava --scenes 500
    """
    from mmspec.cli.loading import reference_model
    from mmspec.evaluation.scenes import FIRST_SEED, score_vlm
    from mmspec.pipelines.checkpoint import load_config

    source = model or reference_model()
    load_config(source)  # refuses what is no checkpoint, in one line
    first = FIRST_SEED if seed is None else seed
    scores = score_vlm(source, scenes, first, descriptions=descriptions, batch_size=batch_size)
    if card:
        from mmspec.evaluation.vlm_card import write_card

        write_card(source, scores, f"mmspec evaluate vlm {source} --scenes {scenes} --seed {first}")
    if as_json:
        print_json({"model": source, **scores})
    else:
        show(_table(scores))


evaluate_app.command()(methods)


def _table(scores: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    title = f"{scores['scenes']} scenes from seed {scores['seed']}, {scores['device']}, {scores['seconds']} s"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    table.add_column("greedy")
    table.add_column("right", justify="right")
    for name, value in scores.items():
        if isinstance(value, float) and name != "seconds":
            table.add_row(name, f"{value:.1%}")
        elif isinstance(value, dict):
            for part, share in value.items():
                table.add_row(f"  {name.removesuffix('_by_kind')}: {part}", f"{share:.1%}")
    return table
