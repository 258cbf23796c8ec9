"""`mmspec evaluate images`: quality and diversity of images of a folder or a model."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import Interruptible, note, progress
from mmspec.cli.image_scoring import SCENES, Scoring, Session, report
from mmspec.cli.loading import (
    REFERENCE_IMAGE,
    announce,
    load_pipeline,
    parse_choice,
    parse_choices,
    with_drafters,
)
from mmspec.cli.many import RayOptions, decode_many
from mmspec.cli.options import GuidanceScale, HeadSteps, Model, ModelOptions, unpack_options
from mmspec.errors import InputError
from mmspec.open_types import Json
from mmspec.validation import given_of

if TYPE_CHECKING:
    from mmspec.evaluation.quality.image_folder import Asked, ImageSet

__all__ = ["images"]

SAMPLES = 200  # more than the scenes network has features
REFERENCE = "reference"


@unpack_options
def images(
    model: Model = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="Accelerators that generate the images, separated by commas.",
            show_default="none",
        ),
    ] = None,
    folder: Annotated[Path | None, typer.Option(help="Score the images in this folder or .npz file.")] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="Prompts in the order of the images: one per line, or a published set."),
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=3, help="Number of images.", show_default="200; all in a folder")
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="Folder to keep the images, with a subfolder per accelerator.")
    ] = None,
    guidance_scale: GuidanceScale = None,
    num_inference_steps: HeadSteps = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Images generated together.")] = 16,
    *,
    scoring: Scoring,
    many: RayOptions,
    how: ModelOptions,
) -> None:
    """Score images: distances to a reference set, agreement with prompts, entropy and diversity.

    Images come from a folder, or from a model with each of the given accelerators,
    by default for captions of held-out scenes. Sets are compared only if they have
    the same number and size of images. Every figure has a 95 % interval.

    The network "scenes" was trained on scenes only, so that its figures are only
    comparable with each other. Published figures use --features inception.

    Example:
        mmspec evaluate images --accelerator none,sjd,lantern --samples 32 --out drawn
        mmspec evaluate images --folder drawn/sjd --against drawn/none
        mmspec evaluate images --ray --accelerator sjd --samples 1000 --out many
    """
    source = str(folder) if folder is not None else announce(model, REFERENCE_IMAGE)
    from mmspec.core.statistics import merge_stats
    from mmspec.evaluation.examples import OTHER_SEEDS
    from mmspec.evaluation.quality.feature_network import check_network_name
    from mmspec.evaluation.quality.image_folder import draw_images, read_images, read_prompts
    from mmspec.evaluation.quality.image_scores import chosen_metrics
    from mmspec.evaluation.quality.reference_statistics import reference_of
    from mmspec.many.work import Item
    from mmspec.pipelines import ImageGenerationPipeline

    metrics, named = chosen_metrics(scoring.metrics)
    check_network_name(scoring.features)
    asked = None if prompt_file is None else read_prompts(prompt_file)
    if folder is not None:
        if model is not None or accelerator is not None or out is not None:
            raise InputError("--folder", source, "cannot be combined with a model, --accelerator or --out")
        score_folder(folder, samples, asked, partial(Session, scoring, how, metrics, named, source))
        return
    choices = parse_choices(accelerator or "none")
    against = scoring.against
    rivals = [parse_choice(str(against))] if is_accelerator(against) else []
    drafted = with_drafters([*choices, *rivals], source, how.drafter)
    choices, rival = drafted[: len(choices)], drafted[-1] if rivals else None
    if not many.ray:
        check_empty(out)
    elif out is None:
        raise InputError("--out", None, "must be a folder with --ray")
    elif rival is not None:
        raise InputError(
            "--against", str(against), "must be scenes, a folder or a file of features with --ray"
        )
    session = Session(scoring, how, metrics, named, source)
    pipe = load_pipeline(ImageGenerationPipeline, source, how)
    subjects = subjects_of(pipe, asked, samples, how.seed)
    reference = session.reference(
        len(subjects),
        (pipe.target.grid.columns * pipe.stride, pipe.target.grid.rows * pipe.stride),
        [prompt for prompt, _ in subjects],
        of_scenes=asked is None,
        objects=1 if pipe.target.vector_size and "class_labels" in subjects[0][1] else None,
        is_drawn=rival is not None,
    )
    sampling = given_of(guidance_scale=guidance_scale, num_inference_steps=num_inference_steps)
    scores: dict[str, Json] = {}
    if many.ray and out is not None:
        items = [
            Item(index, one, label=what.get("class_labels")) for index, (one, what) in enumerate(subjects)
        ]
        for choice in choices:
            place = out / folder_name(choice.label)
            decode_many(source, choice, items, sampling, place, many, how, draws=True)
            scores[choice.label] = session.score(read_images(place, label=choice.label), reference)
        report(session, scores, reference, len(subjects), pipe.sampling(sampling))
        return
    holder = tempfile.TemporaryDirectory(prefix="mmspec-") if out is None else nullcontext(out)
    with holder as kept, Interruptible() as block, progress(quiet=how.as_json) as bar:
        where = Path(kept)
        work = bar.add_task("generating", total=(len(choices) + (rival is not None)) * len(subjects))
        draw = partial(
            draw_images,
            pipe,
            subjects,
            batch_size=batch_size,
            settings=sampling,
            on_images=partial(bar.advance, work),
        )
        if rival is not None:  # the same seeds would have a distance of 0
            pipe.set_accelerator(rival.name, **rival.options)
            draw(where / REFERENCE, seed=how.seed + OTHER_SEEDS)
            drawn = read_images(where / REFERENCE, label=f"{rival.label}, other seeds")
            reference = reference_of(drawn.label, drawn.images, session.network, None)
        for choice in choices:
            bar.update(work, description=choice.label)
            pipe.set_accelerator(choice.name, **choice.options)
            place = where / folder_name(choice.label)
            stats = merge_stats(draw(place, seed=how.seed))
            figures = {"promise": stats.exactness, "forwards per image": stats.nfe_mean}
            drawn = read_images(place, label=choice.label)
            scores[choice.label] = figures | session.score(drawn, reference)
    if scores:
        report(session, scores, reference, len(subjects), pipe.sampling(sampling))
    else:
        note("no accelerator generated all images")
    block.finish()


def score_folder(
    folder: Path, n: int | None, prompts: list[str] | None, open_session: Callable[[], Session]
) -> None:
    """Score the images of a folder and print the figures."""
    from mmspec.evaluation.examples import held_out_captions
    from mmspec.evaluation.quality.image_folder import read_images

    found = with_prompts(read_images(folder, n), prompts, first=n is not None)
    session, count = open_session(), len(found.images)
    are_scenes = found.prompts == held_out_captions(count, session.seed)
    reference = session.reference(count, found.size, found.prompts, of_scenes=are_scenes)
    report(session, {found.label: session.score(found, reference)}, reference, count)


def is_accelerator(against: str | None) -> bool:
    """True unless the value is "scenes", a file of statistics, or a folder."""
    return against not in (None, SCENES) and not (
        str(against).endswith((".safetensors", ".npz")) or "/" in str(against) or Path(str(against)).is_dir()
    )


def with_prompts(images: ImageSet, prompts: list[str] | None, *, first: bool) -> ImageSet:
    """Add the prompts of a file, if any, to the images."""
    if prompts is None:
        return images
    count = len(images.images)
    if len(prompts) < count or (len(prompts) > count and not first):
        raise InputError(
            "--prompt-file", f"{len(prompts)} prompts", f"must have one prompt for each of the {count} images"
        )
    return replace(images, prompts=prompts[:count])


def subjects_of(pipe: Any, prompts: list[str] | None, n: int | None, seed: int) -> list[Asked]:
    """Prompts of the images: those of the user, repeated if necessary, or captions or classes of scenes."""
    from mmspec.evaluation.contenders import image_examples

    if prompts is None:
        return [
            (one.turns[0], {"prompt": one.turns[0]} if one.label is None else {"class_labels": one.label})
            for one in image_examples(pipe, n or SAMPLES, seed)
        ]
    return [
        (prompts[i % len(prompts)], {"prompt": prompts[i % len(prompts)]}) for i in range(n or len(prompts))
    ]


def check_empty(out: Path | None) -> None:
    """Raise InputError unless the folder is new or empty."""
    if out is not None and out.exists() and (not out.is_dir() or any(out.iterdir())):
        raise InputError(
            "--out", str(out), "must be a new or empty folder, so that images of two runs are not mixed"
        )


def folder_name(label: str) -> str:
    """Name of the folder of an accelerator with its options."""
    return "".join(letter if letter.isalnum() or letter in "=.-_" else "," for letter in label)
