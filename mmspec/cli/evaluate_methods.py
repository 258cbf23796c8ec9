"""`mmspec evaluate methods`: every way of decoding image tokens on the same prompts, and its costs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import note, print_result, progress
from mmspec.cli.loading import REFERENCE_IMAGE, compared_choices, load_pipeline, own_drafters, reference_model
from mmspec.cli.options import (
    GuidanceScale,
    HeadSteps,
    LastStepNoise,
    Model,
    ModelOptions,
    Plot,
    Table,
    TopK,
    unpack_options,
)
from mmspec.validation import given_of

if TYPE_CHECKING:
    import rich.table

    from mmspec.evaluation.quality.image_methods import Draw, MethodRecord
    from mmspec.pipelines import ImageGenerationPipeline

__all__ = ["methods"]

# Of the published settings of rules that trade quality for speed none is searched for.
METHODS = (
    "none,sjd:coupling=fresh:window=8|12|16|24|32,sjd:coupling=gumbel:window=8|12|16|24|32,"
    "sjd:coupling=exact:window=8|12|16|24|32,sjd:window=8|12|16|24|32,sjd:front=2x2|4x4x4:reach=3:window=16|32,"
    "sjd:reuse=0.2:window=8|16|32,lantern:delta=0.05:window=16|24|32,lantern:window=16|24|32,"
    "gsd:window=16|24|32,sjd:acceptance=budget:relaxation=omega:window=16|24|32,"
    "sjd:acceptance=lantern:window=16|32,sjd:acceptance=lantern++:window=16|32,"
    "sjd:acceptance=grouped:window=16|32,sjd:acceptance=grouped:partition=codebook:window=16|32,"
    "cool:window=16|32,sjd:acceptance=suffix:window=16|32,zipar:window=1|4|8,zipar:adaptive=true"
)
VECTOR_METHODS = (
    "none,shared_noise:tolerance=0,shared_noise:tolerance=0.05,shared_noise,shared_noise:tolerance=0.2"
)
MASKED_METHODS = (
    "none,masked:iterations=32,masked:iterations=20,masked:iterations=64:last_steps=5,"
    "masked:iterations=20:order=checkerboard,masked:iterations=20:order=checkerboard:last_steps=10"
)
METHODS_WITH_HEAD = {
    "cjd": ",cjd:window=24|32:corrected=19:passes=2|3,"
    "cjd:coupling=exact:window=16|24|32:corrected=15:passes=2,"
    "cjd:acceptance=budget:relaxation=neighbours|omega:window=24|32:corrected=12:passes=1|2,"
    "cjd:acceptance=lantern:window=24|32:corrected=12:passes=1|2",
    "eagle": ",eagle:num_draft_tokens=8|24,eagle:acceptance=budget:num_draft_tokens=8|24,"
    "eagle:acceptance=lantern:num_draft_tokens=8|24",
    "ssd": ",ssd:window=16|24|32,ssd:acceptance=budget:window=16|24|32",
}


@unpack_options
def methods(
    model: Model = None,
    accelerators: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between, options as in sjd:window=16; with several values, as in "
            "sjd:window=8|16, the best of them on other captions is compared.",
            show_default="all of them",
        ),
    ] = None,
    best: Annotated[str, typer.Option(help="What the best is found by: seconds or forwards.")] = "seconds",
    search: Annotated[int, typer.Option(min=1, help="How many other captions it is found on.")] = 12,
    samples: Annotated[int, typer.Option(min=3, help="How many held-out captions.")] = 128,
    num_inference_steps: HeadSteps = None,
    last_step_noise: LastStepNoise = False,
    guidance_scale: GuidanceScale = None,
    top_k: TopK = None,
    out: Table = None,
    plot: Plot = None,
    *,
    how: ModelOptions,
) -> None:
    """Compare the ways of decoding image tokens: what each saves, and what it costs.

    Draws held-out captions one by one with the same seeds by every method, in turns,
    and reads the images with a network that has seen real scenes only: in the folder
    reader/ of the model, or that of assets/scenes-llamagen.

    Example:
        mmspec evaluate methods --samples 16 --accelerators none,sjd,gsd
        mmspec evaluate methods --accelerators 'none,sjd:window=8|16|32,gsd:window=16|32' --best forwards
    """
    from mmspec.cli.choice import alternatives, parse_choice
    from mmspec.evaluation.contenders import image_subjects
    from mmspec.evaluation.machine import environment
    from mmspec.evaluation.plots import check_plot
    from mmspec.evaluation.quality import image_methods
    from mmspec.evaluation.quality.attributes import AttributeJudge
    from mmspec.pipelines import ImageGenerationPipeline

    if plot is not None:
        check_plot(plot)
    source = model or reference_model(REFERENCE_IMAGE)
    if accelerators is not None:
        written = [alternatives(each) for each in accelerators.split(",") if each.strip()]
        _ = compared_choices(",".join(sum(written, [])), source, how.drafter)  # errors should not cost a load
    reader = AttributeJudge.of_model(source)
    pipe = load_pipeline(ImageGenerationPipeline, source, how)
    if accelerators is None:
        written = [alternatives(each) for each in default_methods(pipe, source, how.drafter).split(",")]
    groups = [compared_choices(",".join(labels), source, how.drafter)[-len(labels) :] for labels in written]
    if not any(group[0].label == "none" for group in groups):
        groups = [[parse_choice("none")], *groups]
    subjects = image_subjects(pipe, samples, how.seed)
    others = image_subjects(pipe, search, how.seed + samples)
    sampling = given_of(num_inference_steps=num_inference_steps, guidance_scale=guidance_scale, top_k=top_k)
    sampling |= {"last_step_noise": True} if last_step_noise else {}
    settings = {"model": source, "samples": samples, "seed": how.seed, "batch_size": 1}
    settings |= {"best": best, "search": search}
    settings |= {"attention": pipe.model.config._attn_implementation, **pipe.sampling(sampling)}
    settings |= environment(pipe.device, pipe.dtype)
    drawers = [
        {
            choice.label: drawer(pipe, choice.name, choice.options, subjects | others, sampling)
            for choice in group
        }
        for group in groups
    ]
    tried = sum(len(group) * search for group in drawers if len(group) > 1)
    with progress(quiet=how.as_json) as bar:
        work = bar.add_task("drawing", total=tried + (len(drawers) + 1) * samples)

        def advance(label: str) -> None:
            bar.update(work, advance=1, description=label)

        first = how.seed + samples  # a seed belongs to a caption
        found = [
            image_methods.find_best(group, list(others), by=best, seed=first, on_image=advance)
            for group in drawers
        ]
        settings["tried"] = {label: figures for each in found for label, figures in each.tried.items()}
        records = list(
            image_methods.compare_methods(
                {each.label: group[each.label] for each, group in zip(found, drawers, strict=True)},
                list(subjects),
                reader,
                seed=how.seed,
                searched={each.label: len(each.tried) for each in found if each.tried},
                settings=settings,
                on_image=advance,
            )
        )
    if out is not None:
        note(f"written: {image_methods.write_records(out, records)}")
    if plot is not None:
        note(f"written: {image_methods.draw_plot(plot, records)}")
    print_result([vars(record) for record in records], table(records), how.as_json)


def default_methods(pipe: ImageGenerationPipeline, source: str, drafter: str | None) -> str:
    """The accelerators to compare where none are named."""
    from mmspec.models.head_checkpoint import head_of

    own = own_drafters(source)
    if pipe.target.vector_size:
        methods = MASKED_METHODS if pipe.target.any_order else VECTOR_METHODS
        return methods
    heads = own if drafter is None else {head_of(drafter): drafter}
    return METHODS + "".join(methods for name, methods in METHODS_WITH_HEAD.items() if name in heads)


def drawer(
    pipe: ImageGenerationPipeline,
    name: str,
    options: dict[str, Any],
    subjects: dict[str, dict[str, Any]],
    sampling: dict[str, Any],
) -> Draw:
    """A function that draws one image with an accelerator, which is set up here and only here.

    Args:
        pipe, name, options: the accelerator.
        subjects: what the pipeline is asked for each caption.
        sampling: settings of every call.
    """
    from mmspec.evaluation.quality.image_methods import Drawing
    from mmspec.evaluation.quality.variation import OverlapMeter, VariationMeter, needs_meter

    pipe.set_accelerator(name, **options)
    accelerator = pipe.accelerator

    def draw(caption: str, seed: int) -> Drawing:
        pipe.accelerator = accelerator
        asked = {"prompt": None, **subjects[caption]}
        call = pipe.prepare(asked.pop("prompt"), {"seed": seed, "output_type": "pt", **sampling}, **asked)
        meter, overlap = VariationMeter(), OverlapMeter()
        for step in call.rounds():
            overlap.watch(step)
            if needs_meter(accelerator):
                meter.watch(step)
        if needs_meter(accelerator):
            meter.finish(call.calls[-1])
        output: Any = call.output()
        codes = None if pipe.target.vector_size else pipe.target.grid.codes(output.tokens[0])
        stats, pixels = output.stats, output.decode_seconds
        return Drawing(output.images[0], codes, stats, stats.seconds, pixels, overlap.mean)

    return draw


def table(records: Sequence[MethodRecord]) -> rich.table.Table:
    """The records as people read them; a star marks settings that were not searched for."""
    from mmspec.evaluation.tables import figures

    columns = (
        *("accelerator", "promise", "NFE\nmean", "max", "times\nfewer", "wall\nclock", "with\npixels"),
        *(
            "tv or drift\nmean",
            "max",
            "over-\nlap",
            "roll-\nbacks",
            "attributes",
            "kernel\ndistance",
            "95 %\nmargin",
            "entropy",
        ),
    )
    rows = (
        (
            row.method if row.searched or row.method == "none" else f"{row.method} *",
            row.promise,
            f"{row.nfe_mean:.1f}",
            str(row.nfe_max),
            f"{row.step_compression:.2f}x",
            f"{row.speedup:.2f}x",
            f"{row.speedup_with_pixels:.2f}x",
            decimals(row.drift_mean if row.tv_mean is None else row.tv_mean, 3),
            decimals(row.drift_max if row.tv_max is None else row.tv_max, 3),
            decimals(row.overlap, 2),
            f"{row.rollbacks:.1f}",
            f"{row.attribute_accuracy:.1%}",
            f"{row.feature_distance:.3g}",
            f"{row.feature_margin:.3g}",
            decimals(row.entropy, 2),
        )
        for row in records
    )
    return figures(columns, rows, words=2)


def decimals(value: float | None, places: int) -> str:
    """A number with so many places, or a dash for none."""
    return "-" if value is None else f"{value:.{places}f}"
