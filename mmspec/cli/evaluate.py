"""`mmspec evaluate`: how often a model is right."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import print_json, show
from mmspec.cli.evaluate_drafters import drafters
from mmspec.cli.evaluate_methods import methods
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
    from mmspec.models.checkpoint import load_config
    from mmspec.reference.scoring.vlm import FIRST_SEED, score_vlm

    source = model or reference_model()
    load_config(source)  # refuses what is no checkpoint, in one line
    first = FIRST_SEED if seed is None else seed
    scores = score_vlm(source, scenes, first, descriptions=descriptions, batch_size=batch_size)
    if card:
        from mmspec.reference.scoring.vlm_card import write_card

        write_card(source, scores, f"mmspec evaluate vlm {source} --scenes {scenes} --seed {first}")
    if as_json:
        print_json({"model": source, **scores})
    else:
        show(_table(scores))


evaluate_app.command()(methods)
evaluate_app.command()(drafters)


@evaluate_app.command()
def image(
    model: Model = None,
    scenes: Annotated[int, typer.Option(min=1, help="Held-out scenes to draw.")] = 200,
    seed: Annotated[
        int | None, typer.Option(min=0, help="Seed of the first scene.", show_default="20000")
    ] = None,
    guidance_scales: Annotated[str, typer.Option(help="Guidance scales to try.")] = "1,2,3,4,5",
    batch_size: Annotated[int, typer.Option(min=1, help="Images drawn together.")] = 32,
    card: Annotated[bool, typer.Option("--card", help="Write the model card with the figures.")] = False,
    as_json: AsJson = False,
) -> None:
    """Score an image model of scenes on held-out prompts.

    A network that has seen real scenes only says what the images show.
    Entropy and context sensitivity say how hard the model is to speed up.

    Example:
        mmspec evaluate image assets/scenes-llamagen --scenes 200
    """
    from mmspec.cli.loading import REFERENCE_IMAGE, reference_model
    from mmspec.errors import InputError
    from mmspec.reference.scoring.image import FIRST_SEED, score_image_model

    source = model or reference_model(REFERENCE_IMAGE)
    first = FIRST_SEED if seed is None else seed
    try:
        scales = [float(part) for part in guidance_scales.split(",")]
    except ValueError as error:
        raise InputError(
            "--guidance-scales", guidance_scales, "numbers with commas, such as 1,3,5"
        ) from error
    scores = score_image_model(source, scenes, first, guidance_scales=scales, batch_size=batch_size)
    if card:
        from mmspec.reference.scoring.image_card import write_card

        command = f"mmspec evaluate image {source} --scenes {scenes} --seed {first}"
        write_card(source, scores, f"{command} --guidance-scales {guidance_scales}")
    if as_json:
        print_json({"model": source, **scores})
    else:
        show(_image_table(scores))


def _image_table(scores: dict[str, Any]) -> Table:
    from rich import box
    from rich.table import Table

    title = f"{scores['scenes']} scenes from seed {scores['seed']}, {scores['device']}, {scores['seconds']} s"
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title=title, title_justify="left")
    names = list(scores["real"]["by_attribute"])
    for column in ("", "all facts", *names, "all right"):
        table.add_column(column, justify="right" if column else "left")
    rows = {f"guidance {scale}": figures for scale, figures in scores["guidance"].items()}
    rows |= {name: scores[name] for name in ("prompts", "reconstructed", "real") if name in scores}
    for label, figures in rows.items():
        found = (figures["by_attribute"].get(name) for name in names)
        shares = [figures["share"], *found, figures["exact"]]
        table.add_row(label, *("" if share is None else f"{share:.1%}" for share in shares))
    table.caption = (
        f"entropy {scores['entropy_mean']:.2f} nats (median {scores['entropy_median']:.2f}), "
        f"TV of neighbours {scores['neighbour_tv']:.2f}, after a redraw {scores['redraw_tv']:.2f}"
    )
    return table


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
