"""`mmspec generate`: images from prompts or classes."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import Interruptible, note, print_result, progress
from mmspec.cli.loading import (
    REFERENCE_IMAGE,
    AcceleratorChoice,
    announce,
    choose,
    load_pipeline,
    parse_choice,
    parse_choices,
    with_drafters,
)
from mmspec.cli.many import PromptFile, RayOptions, decode_many, located
from mmspec.cli.options import (
    GuidanceScale,
    HeadSteps,
    LastStepNoise,
    Model,
    ModelOptions,
    TopK,
    TopP,
    setting,
    unpack_options,
)
from mmspec.errors import InputError
from mmspec.open_types import Json, Keywords
from mmspec.validation import given_of

if TYPE_CHECKING:
    import rich.table

    from mmspec.pipelines import ImageGenerationPipeline, ImageOutput

__all__ = ["generate"]

SAMPLES = 4  # without a prompt
FIGURES = (  # stats in the record of an accelerator
    *("exactness", "keeps", "nfe_mean", "nfe_max", "step_compression", "acceptance_length"),
    *("tv_mean", "tv_max", "drift_mean", "drift_max", "rollbacks", "seconds"),
)
COLUMNS_ON_SHEET = 6
SMALLEST_SIDE, LARGEST_SIDE = 192, 512  # of an image on a sheet

Pixels = Annotated[
    int | None, typer.Option(help="Pixels, for models with several sizes.", show_default="that of the model")
]


@dataclass(frozen=True, kw_only=True)
class ImageOptions:
    """Options that are passed to the pipeline unchanged."""

    num_images_per_prompt: Annotated[int, setting("num_images_per_prompt", min=1)] = 1
    negative_prompt: Annotated[str | None, typer.Option(help="Negative prompt of guidance.")] = None
    guidance_scale: GuidanceScale = None
    temperature: Annotated[
        float | None,
        typer.Option(help="Sampling temperature; 0 is greedy.", show_default="that of the model"),
    ] = None
    top_k: TopK = None
    top_p: TopP = None
    height: Pixels = None
    width: Pixels = None
    control_image: Annotated[
        str | None, typer.Option(help="Control image (edges, depth, ...) for ControlAR.")
    ] = None
    control_strength: Annotated[
        float | None, typer.Option(help="Weight of the control image; 0 ignores it.", show_default="1")
    ] = None
    batch_size: Annotated[int, setting("batch_size", min=1)] = 1
    num_inference_steps: HeadSteps = None
    last_step_noise: LastStepNoise = False

    @property
    def settings(self) -> Keywords:
        """The keywords of every call that are not None."""
        control = None if self.control_image is None else located(self.control_image)
        given = {"control_image": control, "last_step_noise": self.last_step_noise or None}
        return given_of(**{**vars(self), **given})


@unpack_options
def generate(
    model: Model = None,
    prompts: Annotated[
        list[str] | None,
        typer.Argument(metavar="PROMPT...", help="Prompts; by default captions of held-out scenes."),
    ] = None,
    classes: Annotated[
        list[int] | None,
        typer.Option("--class", help="Class label, for class-conditional models; repeatable."),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="none, sjd, lantern:delta=0.2, zipar, shared_noise, masked:iterations=20, ...; several, "
            "separated by commas, draw the same seeds side by side.",
            show_default="sjd; none for continuous tokens",
        ),
    ] = None,
    window: Annotated[
        int | None, typer.Option(help="Places drafted together, for accelerators with a window.")
    ] = None,
    out: Annotated[Path, typer.Option(help="Image file to write; with --ray a folder.")] = Path("image.png"),
    prompt_file: PromptFile = None,
    *,
    asked: ImageOptions,
    many: RayOptions,
    how: ModelOptions,
) -> None:
    """Generate images from prompts or classes.

    Several images are written as one sheet with captions. The table shows the
    promise of each accelerator: exact, a bound on the total variation distance per
    token (tv<=0.1), approximate, or lossy.

    Example:
        mmspec generate assets/scenes-llamagen "a red ring left of a small blue cross" --out rings.png
        mmspec generate path/to/controlar-hed "a bird" --control-image path/to/edges.png
        mmspec generate --accelerator none,sjd,gsd,lantern --out compared.png
        mmspec generate --ray --prompt-file assets/prompts/geneval.jsonl --out drawn
    """
    source = announce(model, REFERENCE_IMAGE)
    from mmspec.evaluation.contenders import image_examples
    from mmspec.evaluation.prompt_files import read_prompt_file
    from mmspec.pipelines import ImageGenerationPipeline

    choices = [] if accelerator is None else parse_choices(accelerator)
    if prompt_file is not None:
        prompts = [*(prompts or []), *(one.only_turn() for one in read_prompt_file(prompt_file))]
    if not choices and how.drafter is not None:
        choices = [choose(None, source, how.drafter)]
    if many.ray:
        draw_many(prompts or [], classes or [], source, with_window(choices, window), out, asked, many, how)
        return
    check_image_file(out)
    pipe: ImageGenerationPipeline | None = None
    if not choices:  # the default depends on the model
        pipe = load_pipeline(ImageGenerationPipeline, source, how)
        choices = [parse_choice(pipe.default_accelerator)]
    choices = with_drafters(with_window(choices, window), source, how.drafter)
    pipe = pipe or load_pipeline(ImageGenerationPipeline, source, how)
    if not prompts and not classes:
        examples = image_examples(pipe, SAMPLES, how.seed)
        note("no prompt or class given: using captions of held-out scenes, or the first classes")
        classes = [one.label for one in examples if one.label is not None]
        prompts = [one.only_turn() for one in examples if one.label is None]
    what: Keywords = {"prompt": prompts or None, "class_labels": classes or None, "seed": how.seed}
    n = asked.num_images_per_prompt
    titles = [*(prompts or []), *(f"class {label}" for label in classes or [])]
    titles = [title for title in titles for _ in range(n)]
    accelerators = [pipe.set_accelerator(one.name, **one.options).accelerator for one in choices]
    drawn: dict[str, ImageOutput] = {}
    with Interruptible() as block, progress(quiet=how.as_json) as bar:
        length = pipe.target.layout_of(pipe.target.grid).length
        for choice, pipe.accelerator in zip(choices, accelerators, strict=True):
            work = bar.add_task(choice.label, total=len(titles) * length)

            def count(_pipe: object, step: int, committed: int, kwargs: object, work: Any = work) -> None:
                bar.update(work, completed=committed)

            output: Any = pipe(**what, **asked.settings, callback_on_step_end=count)
            drawn[choice.label] = output
    if drawn:
        save_images(out, titles, drawn, columns=n if len(titles) > n > 1 else COLUMNS_ON_SHEET)
        first = next(iter(drawn.values()))
        records = [
            {"accelerator": label, **record(output, first, titles), "seed": how.seed, "out": str(out)}
            for label, output in drawn.items()
        ]
        print_result(records, table(records), how.as_json)
        if not how.as_json:
            typer.echo(str(out))
    block.finish()


def draw_many(
    prompts: Sequence[str],
    classes: Sequence[int],
    source: str,
    choices: Sequence[AcceleratorChoice],
    out: Path,
    asked: ImageOptions,
    many: RayOptions,
    how: ModelOptions,
) -> None:
    """Generate an image of every prompt and class with many workers, and write them to a folder."""
    from mmspec.many.work import Item

    if len(choices) > 1:
        raise InputError(
            "--accelerator", [one.label for one in choices], "must be one accelerator with --ray"
        )
    if not prompts and not classes:
        raise InputError("prompts, --prompt-file or --class", None, "must be given with --ray")
    (choice,) = with_drafters(choices or [parse_choice("sjd")], source, how.drafter)
    settings = asked.settings
    del settings["batch_size"]
    n = settings.pop("num_images_per_prompt")
    what = [*((one, None) for one in prompts), *((None, label) for label in classes)]
    each = [pair for pair in what for _ in range(n)]
    items = [Item(index, prompt, label=label) for index, (prompt, label) in enumerate(each)]
    records = decode_many(source, choice, items, settings, out, many, how, draws=True)
    forwards = sum(one["target_forwards"] for one in records) / len(records)
    print_result(records, f"{out}: {len(records)} images, {forwards:.1f} forward passes each", how.as_json)


def with_window(choices: Sequence[AcceleratorChoice], window: int | None) -> list[AcceleratorChoice]:
    """Add the option `window` to the choices whose drafter has a window and which do not set it."""
    if window is None:
        return list(choices)
    from mmspec.accelerators import options_of

    have = {one.name for one in choices if one.method is not None and "window" in options_of(one.method)}
    if not have:
        raise InputError("--window", window, "needs an accelerator that has a window, such as sjd")
    return [
        replace(choice, options={"window": window, **choice.options}) if choice.name in have else choice
        for choice in choices
    ]


def check_image_file(path: Path) -> None:
    """Raise InputError unless the path is an image file in a folder that can be written."""
    from PIL import Image

    if path.is_dir() or path.suffix.lower() not in Image.registered_extensions():
        raise InputError("--out", str(path), "must be an image file such as image.png")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError("--out", str(path), "must be in a folder that can be written")


def save_images(path: Path, titles: Sequence[str], drawn: dict[str, ImageOutput], columns: int) -> None:
    """Write one image, or a sheet of several, with one column per accelerator if there are several."""
    from mmspec.scenes.contact_sheet import image_sheet

    images, captions, first = [], [], next(iter(drawn.values()))
    for index, title in enumerate(titles):
        for column, (label, output) in enumerate(drawn.items()):
            images.append(output.images[index])
            words = f"{output.stats.nfe[index]} forward passes"
            if len(drawn) > 1:
                same = column and is_same(output.tokens[index], first.tokens[index])
                words = f"{label}\n{output.stats.exactness}{', same image' * bool(same)}\n{words}"
            captions.append(words if column else f"{words}\n{title}")
    side = min(max(SMALLEST_SIDE, *images[0].size), LARGEST_SIDE)
    columns = len(drawn) if len(drawn) > 1 else columns
    sheet = images[0] if len(images) == 1 else image_sheet(images, captions, columns, side)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        sheet.save(path)
    except OSError as error:
        raise InputError("--out", str(path), f"must be a file that can be written ({error})") from error


def record(output: ImageOutput, first: ImageOutput, titles: Sequence[str]) -> Json:
    """The figures of one accelerator; `identical` counts images with the tokens of the first one."""
    stats = output.stats
    figures = {name: getattr(stats, name) for name in FIGURES}
    images = zip(titles, stats.nfe, output.tokens, output.finish_reasons, strict=True)
    return figures | {
        "tv_max": stats.tv_max if stats.tv_places else None,
        "drift_max": stats.drift_max if stats.drift_places else None,
        "decode_seconds": output.decode_seconds,
        "identical": sum(map(is_same, output.tokens, first.tokens)),
        "images": [
            {"title": title, "nfe": nfe, "new_tokens": len(tokens), "finish_reason": reason}
            for title, nfe, tokens, reason in images
        ],
    }


def is_same(tokens: Any, others: Any) -> bool:
    """True if two images have the same token ids or vectors."""
    return bool(tokens == others) if isinstance(tokens, list) else bool((tokens == others).all())


def table(records: Sequence[Json]) -> rich.table.Table:
    """The records as a table."""
    from mmspec.evaluation.tables import figures

    columns = ("accelerator", "promise", "forward\npasses", "most", "times\nfewer", "seconds", "tv or\ndrift")
    rows = []
    for row in records:
        measured = row["drift_mean"] if row["tv_mean"] is None else row["tv_mean"]
        promise = f"{row['exactness']} ({row['keeps']})" if row["keeps"] else row["exactness"]
        counted = f"{row['nfe_mean']:.1f}", str(row["nfe_max"]), f"{row['step_compression']:.2f}"
        shown = "-" if measured is None else f"{measured:.3f}"
        rows.append((row["accelerator"], promise, *counted, f"{row['seconds']:.2f}", shown))
    return figures(columns, rows, words=2)
