"""`mmspec generate`: words in, images out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.choice import AcceleratorChoice, parse_choice, parse_choices
from mmspec.cli.console import Interruptible, note, print_json, progress, show
from mmspec.cli.options import AsJson, Device, Drafter, Dtype, Seed
from mmspec.errors import InputError

if TYPE_CHECKING:
    from rich.table import Table

    from mmspec.pipelines import ImageOutput, ImagePipeline

__all__ = ["generate"]

SAMPLES = 4  # without a prompt
ACCELERATOR = "sjd"
COLUMNS_ON_SHEET = 6
SMALLEST_SIDE, LARGEST_SIDE = 192, 512  # of an image on a sheet


@dataclass(frozen=True)
class Drawn:
    """What one accelerator drew."""

    label: str
    output: ImageOutput


def generate(
    prompts: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="PROMPT...", help="What to draw; held-out captions if none.", show_default=False
        ),
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(help="Checkpoint folder or hub id; the reference model if none.", show_default=False),
    ] = None,
    classes: Annotated[
        list[int] | None,
        typer.Option("--class", help="Label, for models of classes; may be repeated.", show_default=False),
    ] = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="none, sjd, sjd:coupling=exact, lantern:delta=0.2, zipar, ...", show_default=ACCELERATOR
        ),
    ] = None,
    compare: Annotated[
        str | None,
        typer.Option(
            help="Accelerators, such as none,sjd,gsd,lantern, that draw the same seeds side by side.",
            show_default=False,
        ),
    ] = None,
    drafter: Drafter = None,
    window: Annotated[
        int | None,
        typer.Option(help="Places drafted at once, for accelerators that have a window.", show_default=False),
    ] = None,
    n: Annotated[int, typer.Option("--n", min=1, help="Images of each prompt.")] = 1,
    out: Annotated[Path, typer.Option(help="Image file to write.")] = Path("picture.png"),
    negative_prompt: Annotated[
        str | None, typer.Option(help="What guidance leads away from.", show_default=False)
    ] = None,
    guidance: Annotated[
        float | None, typer.Option(help="Guidance scale; 1 is off.", show_default="the model's")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(help="0 takes the likeliest token everywhere.", show_default="the model's"),
    ] = None,
    top_k: Annotated[
        int | None, typer.Option(help="0 keeps every token.", show_default="the model's")
    ] = None,
    top_p: Annotated[
        float | None, typer.Option(help="1 keeps every token.", show_default="the model's")
    ] = None,
    height: Annotated[
        int | None, typer.Option(help="Pixels, for models of several sizes.", show_default="the model's")
    ] = None,
    width: Annotated[
        int | None, typer.Option(help="Pixels, for models of several sizes.", show_default="the model's")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images decoded together.")] = 1,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Draw images from prompts, in fewer forwards of the model.

    One image is written as it is, several as a sheet with captions. What each
    accelerator promises is said with its figures: exact, a bound on the total
    variation of every token (tv<=0.1), or lossy.

    Example:
        mmspec generate "a red ring left of a small blue cross" --n 4 --out rings.png
        mmspec generate --compare none,sjd,gsd,lantern --out compared.png
    """
    from mmspec.cli.loading import REFERENCE_IMAGE, load_image_pipeline, reference_model, with_drafter

    choices = with_window(chosen(accelerator, compare), window)
    source = model or reference_model(REFERENCE_IMAGE)
    choices = [with_drafter(choice, source, drafter) for choice in choices]
    check_image_file(out)
    pipe = load_image_pipeline(source, dtype=dtype, device=device)
    if not prompts and not classes:
        prompts, classes = samples(pipe, seed)
    what: dict[str, Any] = {
        "prompt": prompts or None,
        "class_labels": classes or None,
        "negative_prompt": negative_prompt,
        "guidance_scale": guidance,
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "height": height,
        "width": width,
        "num_images_per_prompt": n,
        "batch_size": batch_size,
        "seed": seed,
    }
    titles = [*(prompts or []), *(f"class {label}" for label in classes or [])]
    titles = [title for title in titles for _ in range(n)]
    accelerators = [pipe.set_accelerator(one.name, **one.options).accelerator for one in choices]
    drawn: list[Drawn] = []
    with Interruptible() as block, progress(quiet=as_json) as bar:
        for choice, pipe.accelerator in zip(choices, accelerators, strict=True):
            work = bar.add_task(choice.label, total=len(titles) * pipe.target.grid.length)

            def count(_pipe: object, step: int, committed: int, kwargs: object, work: Any = work) -> None:
                bar.update(work, completed=committed)

            output: Any = pipe(**what, callback_on_step_end=count)
            drawn.append(Drawn(choice.label, output))
    if drawn:
        save_images(out, titles, drawn, columns=n if len(titles) > n > 1 else COLUMNS_ON_SHEET)
        records = [record(one, drawn[0], titles, seed, out) for one in drawn]
        if as_json:
            print_json(records)
        else:
            show(figures(records))
            typer.echo(str(out))
    block.finish()


def chosen(accelerator: str | None, compare: str | None) -> list[AcceleratorChoice]:
    """The accelerators to draw with.

    Raises:
        InputError: both options, or no such accelerator.
    """
    if compare is None:
        return [parse_choice(ACCELERATOR if accelerator is None else accelerator)]
    if accelerator is not None:
        raise InputError("--compare", compare, "either --accelerator or --compare, not both")
    return parse_choices(compare)


def with_window(choices: Sequence[AcceleratorChoice], window: int | None) -> list[AcceleratorChoice]:
    """The choices, with this window where the drafter has one and the choice names none itself.

    Raises:
        InputError: none of them has a window.
    """
    from mmspec.accelerators import find_preset, keywords
    from mmspec.drafters import DRAFTERS

    if window is None:
        return list(choices)
    have = {
        choice.name for choice in choices if "window" in keywords(DRAFTERS[find_preset(choice.name).drafter])
    }
    if not have:
        raise InputError("--window", window, f"an accelerator that has a window, such as {ACCELERATOR}")
    return [
        replace(choice, options={"window": window, **choice.options}) if choice.name in have else choice
        for choice in choices
    ]


def check_image_file(path: Path) -> None:
    """Raise InputError for what is no image file, or in a folder that cannot be written."""
    from PIL import Image

    if path.is_dir() or path.suffix.lower() not in Image.registered_extensions():
        raise InputError("--out", str(path), "a picture file such as picture.png")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir() or not os.access(folder, os.W_OK):
        raise InputError("--out", str(path), "a file in a folder that can be written")


def samples(pipe: ImagePipeline, seed: int) -> tuple[list[str] | None, list[int] | None]:
    """Captions of held-out scenes, or the first classes."""
    from mmspec.reference.scenes import IMAGE_TOKENS, caption, sample_scene

    classes = getattr(pipe.model.config, "num_classes", 0)
    if getattr(pipe.model.config, "condition_type", None) == "class":
        note(f"no class named: the first of {classes} are taken")
        return None, list(range(min(SAMPLES, classes)))
    note("no prompt: the captions of held-out scenes are taken")
    scenes = [sample_scene(SAMPLES * seed + index, profile=IMAGE_TOKENS) for index in range(SAMPLES)]
    return [caption(scene) for scene in scenes], None


def save_images(path: Path, titles: Sequence[str], drawn: Sequence[Drawn], columns: int) -> None:
    """Write the one image, or a sheet: a column for each accelerator where there are several.

    Raises:
        InputError: the file cannot be written.
    """
    from mmspec.reference.scenes.contact_sheet import image_sheet

    images, captions = [], []
    for index, title in enumerate(titles):
        for column, one in enumerate(drawn):
            images.append(one.output.images[index])
            forwards = f"NFE {one.output.stats.nfe[index]}"
            words = f"{one.label}\n{forwards}" if len(drawn) > 1 else forwards
            captions.append(words if column else f"{words}\n{title}")
    side = min(max(SMALLEST_SIDE, *images[0].size), LARGEST_SIDE)
    columns = len(drawn) if len(drawn) > 1 else columns
    image = images[0] if len(images) == 1 else image_sheet(images, captions, columns, side)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        image.save(path)
    except OSError as error:
        raise InputError("--out", str(path), f"a file that can be written ({error})") from error


def record(drawn: Drawn, first: Drawn, titles: Sequence[str], seed: int, out: Path) -> dict[str, Any]:
    """The figures of one accelerator; `identical` counts the images with the same tokens as the first's."""
    output, stats = drawn.output, drawn.output.stats
    return {
        "accelerator": drawn.label,
        "exactness": stats.exactness,
        "nfe_mean": stats.nfe_mean,
        "nfe_max": stats.nfe_max,
        "step_compression": stats.step_compression,
        "acceptance_length": stats.acceptance_length,
        "tv_mean": stats.tv_mean,
        "tv_max": stats.tv_max if stats.tv_places else None,
        "seconds": stats.seconds,
        "decode_seconds": output.decode_seconds,
        "identical": sum(map(list.__eq__, output.tokens, first.output.tokens)),
        "seed": seed,
        "out": str(out),
        "images": [
            {"title": title, "nfe": nfe, "new_tokens": len(tokens), "finish_reason": reason}
            for title, nfe, tokens, reason in zip(
                titles, stats.nfe, output.tokens, output.finish_reasons, strict=True
            )
        ],
    }


def figures(records: Sequence[dict[str, Any]]) -> Table:
    """The records as a table."""
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for name in ("accelerator", "promise"):
        table.add_column(name)
    for name in ("forwards: mean", "max", "tokens per forward", "seconds", "for pixels", "measured tv"):
        table.add_column(name, justify="right")
    for row in records:
        tv = "-" if row["tv_mean"] is None else f"{row['tv_mean']:.3f}"
        table.add_row(
            row["accelerator"],
            row["exactness"],
            f"{row['nfe_mean']:.1f}",
            str(row["nfe_max"]),
            f"{row['step_compression']:.2f}",
            f"{row['seconds']:.2f}",
            f"{row['decode_seconds']:.2f}",
            tv,
        )
    return table
