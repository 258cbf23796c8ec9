"""`mmspec evaluate`: scores of answers here, scores of images in a module of their own."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmspec.cli.console import Interruptible, note, print_result, progress
from mmspec.cli.evaluate_images import images
from mmspec.cli.loading import compared_choices, default_choices, load_pipeline, reference_model
from mmspec.cli.options import BatchSize, Model, ModelOptions, Temperature, unpack_options
from mmspec.open_types import Json, Keywords

if TYPE_CHECKING:
    from mmspec.evaluation.quality.text_scores import Referenced

__all__ = ["evaluate_app"]

evaluate_app = typer.Typer(help="Score answers and images.", no_args_is_help=True)
evaluate_app.command()(images)


@evaluate_app.command()
@unpack_options
def text(
    model: Model = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            "--accelerator",
            "--accelerators",
            help="Names with commas between; plain decoding comes along.",
            show_default="none, copy, and every drafter that the model names",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(help="Your own questions: an object a line with prompt, image and references (a list)."),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(min=3, help="Scenes, or lines of the file.", show_default="16 scenes; all lines"),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(help="Of exact, bleu, rouge, cider.", show_default="exact for scenes; all for your own"),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of an answer.")] = 64,
    temperature: Temperature = 0.0,
    batch_size: BatchSize = 1,
    *,
    how: ModelOptions,
) -> None:
    """Score answers, and compare them with plain decoding's token for token.

    Without a file, held-out scenes are described and asked about; their captions
    and answers are right or wrong. Every figure has a 95 % interval. Exits with 1
    if an accelerator that promises exactness changes a greedy token in float32.

    Example:
        mmspec evaluate text --accelerator copy,eagle --samples 8
    """
    from mmspec.core.sampling import LEAST_TEMPERATURE
    from mmspec.evaluation.contenders import contender, load_images
    from mmspec.evaluation.machine import environment
    from mmspec.evaluation.quality import text_scores as scoring
    from mmspec.pipelines import VisionLanguagePipeline

    if prompt_file is None:
        measured = scoring.chosen_metrics(metrics, ("exact",))
        items = scoring.scene_references(samples or 16, how.seed)
    else:
        measured = scoring.chosen_metrics(metrics, scoring.METRICS)
        items = scoring.read_references(prompt_file, samples)
    tasks: dict[str, list[Referenced]] = {}
    for item in items:
        tasks.setdefault(item.example.category, []).append(item)
    check_counts(tasks, prompt_file)
    source = model or reference_model()
    if accelerator is not None:
        choices = compared_choices(accelerator, source, how.drafter)
    loaded = {task: load_images([item.example for item in some]) for task, some in tasks.items()}
    pipe = load_pipeline(VisionLanguagePipeline, source, how)
    if accelerator is None:
        choices = default_choices(source, how.drafter, pipe.target, pipe.default_accelerator)
    settings: Keywords = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    rows: dict[str, Json] = {}
    plain: dict[str, list[list[int]]] = {}
    with Interruptible() as block, progress(quiet=how.as_json) as bar:
        work = bar.add_task("decoding", total=len(choices) * len(items))
        for choice in sorted(choices, key=lambda one: one.label != "none"):  # the others are compared with it
            bar.update(work, description=choice.label)
            decode = contender(pipe, choice.name, **choice.options).decoder(how.seed, **settings)
            decoded: dict[str, list[list[int]]] = {}
            row: Json = {}
            for task, examples in loaded.items():
                decoded[task] = []
                for start in range(0, len(examples), batch_size):
                    output = decode(examples[start : start + batch_size])
                    decoded[task] += output.tokens
                    row["promise"] = output.stats[0].exactness
                    bar.advance(work, len(output.tokens))
            plain = plain or decoded
            row |= compare(decoded, plain)
            for task, some in tasks.items():
                said = [pipe.tokenizer.decode(one, skip_special_tokens=True).strip() for one in decoded[task]]
                scores = scoring.score_texts(said, [item.references for item in some], measured)
                row |= {f"{task}: {name}" if task else name: one for name, one in scores.items()}
            rows[choice.label] = row
    if not rows:
        note("no accelerator has answered all questions")
        block.finish()
    task = "scenes" if prompt_file is None else str(prompt_file)
    described = {"model": source, "task": task, "samples": len(items), "seed": how.seed}
    described |= {"batch_size": batch_size, **settings, **environment(pipe.device, pipe.dtype)}
    broken = [
        label
        for label, row in rows.items()
        if row["promise"] == "exact" and row["differences"] and temperature < LEAST_TEMPERATURE
    ]
    report(rows, described, how.as_json)
    for label in broken:
        note(f"{label} promises exactness, and changes tokens of {len(rows[label]['differences'])} answers")
    block.finish(1 if broken and described["dtype"] == "float32" else 0)


def check_counts(tasks: dict[str, list[Referenced]], prompt_file: Path | None) -> None:
    """Raise InputError where a category has too few questions for an interval."""
    from mmspec.errors import InputError

    for task, items in tasks.items():
        if len(items) < 3:
            of_file = f"{prompt_file}{f', category {task!r}' if task else ''}"
            name = "--samples" if prompt_file is None else of_file
            raise InputError(name, f"{len(items)} questions", "at least 3 of each category")


def compare(decoded: dict[str, list[list[int]]], plain: dict[str, list[list[int]]]) -> Json:
    """Share of answers that are plain decoding's token for token, and where the others differ first."""
    from mmspec.evaluation.identity.comparison import first_difference
    from mmspec.evaluation.quality.intervals import proportion

    ours, theirs = ([row for rows in one.values() for row in rows] for one in (decoded, plain))
    places = [first_difference(*pair) for pair in zip(theirs, ours, strict=True)]
    found = [(index, place) for index, place in enumerate(places) if place is not None]
    return {
        "identical": proportion(len(ours) - len(found), len(ours)),
        "differences": [{"example": index, "position": place} for index, place in found],
    }


def report(rows: dict[str, Json], settings: Keywords, as_json: bool) -> None:
    """Print the figures: a row for each accelerator."""
    from mmspec.evaluation.quality.intervals import jsonable
    from mmspec.evaluation.tables import figures

    names = [name for name in next(iter(rows.values())) if name != "differences"]
    cells = [[label, *(str(row[name]) for name in names)] for label, row in rows.items()]
    title = f"{settings['samples']} questions, {settings['task']}, {settings['dtype']}, {settings['device']}"
    caption = "value [95 % interval]; identical: to plain decoding, token for token"
    table = figures(("accelerator", *names), cells, title=title, caption=caption, caption_justify="left")
    found = [{"accelerator": label} | jsonable(row) for label, row in rows.items()]
    print_result({"settings": settings, "rows": found}, table, as_json)
