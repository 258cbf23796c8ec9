"""`mmspec evaluate methods`: every way of decoding image tokens on the same prompts, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import note, print_json, progress, show
from mmspec.cli.options import AsJson, Device, Drafter, Dtype, Seed

if TYPE_CHECKING:
    from rich.table import Table

    from mmspec.evaluation.quality.image_methods import Draw, MethodRecord
    from mmspec.pipelines import ImagePipeline

__all__ = ["methods"]

METHODS = (
    "none",
    "sjd:coupling=fresh",
    "sjd:coupling=gumbel",
    "sjd:coupling=exact",
    "sjd",
    "sjd:tail_depth=3:tail_children=4",
    "lantern:delta=0.05",
    "lantern",
    "gsd",
    "sjd:acceptance=lantern",
    "sjd:acceptance=grouped",
    "cool",
    "sjd:acceptance=suffix",
    "zipar",
)
METHODS_WITH_DRAFTER = ("eagle", "eagle:acceptance=budget:relaxation=neighbours", "eagle:acceptance=lantern")


def methods(
    model: Annotated[
        str | None,
        typer.Argument(help="Image model with a reader/ folder; the reference model if none."),
    ] = None,
    accelerators: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between, options as in sjd:window=16.", show_default="all of them"
        ),
    ] = None,
    drafter: Drafter = None,
    samples: Annotated[int, typer.Option(min=3, help="How many held-out captions.")] = 128,
    out: Annotated[Path | None, typer.Option(help="JSON file to write as well.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Image of the table to write (matplotlib).", show_default=False)
    ] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Compare the ways of decoding image tokens: what each saves, and what it costs.

    Draws held-out captions one by one with the same seeds by every method, in turns,
    and reads the images with a network that has seen real scenes only.

    Example:
        mmspec evaluate methods --samples 16 --accelerators none,sjd,gsd
    """
    from mmspec.cli.choice import parse_choice, parse_choices
    from mmspec.cli.loading import (
        REFERENCE_IMAGE,
        load_image_pipeline,
        own_drafters,
        reference_model,
        with_drafter,
    )
    from mmspec.evaluation.plot import check_plot
    from mmspec.evaluation.quality.image_methods import (
        compare_methods,
        draw_plot,
        held_out_captions,
        write_records,
    )
    from mmspec.evaluation.speed.timing import BASELINE
    from mmspec.reference.scoring.attributes import AttributeJudge

    if plot is not None:
        check_plot(plot)
    source = model or reference_model(REFERENCE_IMAGE)
    if accelerators is None:
        has_head = drafter is not None or "eagle" in own_drafters(source)
        accelerators = ",".join(METHODS + (METHODS_WITH_DRAFTER if has_head else ()))
    choices = [with_drafter(choice, source, drafter) for choice in parse_choices(accelerators)]
    if BASELINE not in {choice.label for choice in choices}:
        choices.insert(0, parse_choice(BASELINE))
    reader = AttributeJudge.from_folder(Path(source) / "reader")
    pipe = load_image_pipeline(source, dtype=dtype, device=device)
    captions = held_out_captions(samples, seed)
    drawers = {choice.label: drawer(pipe, choice.name, choice.options) for choice in choices}
    records: list[MethodRecord] = []
    with progress(quiet=as_json) as bar:
        work = bar.add_task("drawing", total=(len(drawers) + 1) * samples)
        records += compare_methods(
            drawers,
            captions,
            reader,
            seed=seed,
            settings=settings_of(pipe, source, samples, seed),
            on_image=lambda label: bar.update(work, advance=1, description=label),
        )
    if out is not None:
        note(f"written: {write_records(out, records)}")
    if plot is not None:
        note(f"written: {draw_plot(plot, records)}")
    if as_json:
        print_json([vars(record) for record in records])
    else:
        show(table(records))


def drawer(pipe: ImagePipeline, name: str, options: dict[str, Any]) -> Draw:
    """A function that draws one image with an accelerator, which is set up here and only here."""
    from mmspec.evaluation.quality.image_methods import Drawing
    from mmspec.evaluation.quality.variation import with_meter

    pipe.set_accelerator(name, **options)
    accelerator = with_meter(pipe.accelerator)

    def draw(prompt: str, seed: int) -> Drawing:
        pipe.accelerator = accelerator
        output: Any = pipe(prompt, seed=seed, output_type="pt")
        codes = pipe.target.grid.codes(output.tokens[0])
        return Drawing(output.images[0], codes, output.stats, output.stats.seconds, output.decode_seconds)

    return draw


def settings_of(pipe: ImagePipeline, source: str, samples: int, seed: int) -> dict[str, Any]:
    """What the figures depend on."""
    from mmspec.cli.bench import environment

    config = pipe.model.generation_config
    warpers = ("guidance_scale", "temperature", "top_k", "top_p")
    return {
        "model": source,
        "samples": samples,
        "seed": seed,
        "batch_size": 1,
        "attention": pipe.model.config._attn_implementation,
        **{name: getattr(config, name, None) for name in warpers},
        **environment(pipe),
    }


def table(records: Sequence[MethodRecord]) -> Table:
    """The records as people read them."""
    from rich import box
    from rich.table import Table

    found = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    found.add_column("accelerator", overflow="fold")
    found.add_column("promise")
    for header in (
        "NFE\nmean", "max", "times\nfewer", "wall\nclock", "with\npixels", "measured tv\nmean", "max",
        "attributes", "kernel\ndistance", "95 %\nmargin", "entropy",
    ):  # fmt: skip
        found.add_column(header, justify="right", no_wrap=True)
    for row in records:
        found.add_row(
            row.method,
            row.promise,
            f"{row.nfe_mean:.1f}",
            str(row.nfe_max),
            f"{row.step_compression:.2f}x",
            f"{row.speedup:.2f}x",
            f"{row.speedup_with_pixels:.2f}x",
            "-" if row.tv_mean is None else f"{row.tv_mean:.3f}",
            "-" if row.tv_max is None else f"{row.tv_max:.3f}",
            f"{row.attribute_accuracy:.1%}",
            f"{row.feature_distance:.3g}",
            f"{row.feature_margin:.3g}",
            f"{row.entropy:.2f}",
        )
    return found
