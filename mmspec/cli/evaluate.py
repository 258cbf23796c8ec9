"""`mmspec evaluate`: `text` scores answers; `images` is in `evaluate_images`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from mmspec.cli.console import Interruptible, note, print_result, progress
from mmspec.cli.evaluate_images import images
from mmspec.cli.help_text import Command
from mmspec.cli.loading import announce, compared_choices, default_choices, load_pipeline
from mmspec.cli.options import BatchSize, Model, ModelOptions, Temperature, Wide, unpack_options
from mmspec.open_types import Json, Keywords

if TYPE_CHECKING:
    from mmspec.evaluation.quality.text_scores import Referenced

__all__ = ["evaluate_app"]

evaluate_app = typer.Typer(help="Score answers and images.", no_args_is_help=True)
evaluate_app.command(cls=Command)(images)


@evaluate_app.command(cls=Command)
@unpack_options
def text(
    model: Model = None,
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="Names separated by commas; plain decoding is always included.",
            show_default="none, copy, and the drafters of the model's folder",
        ),
    ] = None,
    prompt_file: Annotated[
        Path | None,
        typer.Option(
            help="Your own questions: one JSON object per line with prompt, image and references (a list)."
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            min=3, help="Number of scenes, or of lines of the file.", show_default="16 scenes; all lines"
        ),
    ] = None,
    metrics: Annotated[
        str | None,
        typer.Option(
            help="Some of exact, bleu, rouge, cider.", show_default="exact for scenes; all for a file"
        ),
    ] = None,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Maximum number of tokens per answer.")] = 64,
    temperature: Temperature = 0.0,
    batch_size: BatchSize = 1,
    wide: Wide = False,
    *,
    how: ModelOptions,
) -> None:
    """Score answers, and compare them token for token with plain decoding.

    Without a file, the model answers questions about held-out scenes, whose captions
    and answers are known. Every figure has a 95 % interval. The exit code is 1 if an
    exact accelerator changes a greedy token in float32.

    Example:
        mmspec evaluate text --accelerator copy,eagle --samples 8
    """
    source = announce(model)
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
        for choice in sorted(choices, key=lambda one: one.label != "none"):  # the reference comes first
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
        note("no accelerator answered all questions")
        block.finish()
    task = "scenes" if prompt_file is None else str(prompt_file)
    described = {"model": source, "task": task, "samples": len(items), "seed": how.seed}
    described |= {"batch_size": batch_size, **settings, **environment(pipe.device, pipe.dtype)}
    broken = [
        label
        for label, row in rows.items()
        if row["promise"] == "exact" and row["differences"] and temperature < LEAST_TEMPERATURE
    ]
    report(rows, described, how.as_json, wide=wide)
    for label in broken:
        note(f"{label} is exact by its promise, but changed {len(rows[label]['differences'])} answers")
    block.finish(1 if broken and described["dtype"] == "float32" else 0)


def check_counts(tasks: dict[str, list[Referenced]], prompt_file: Path | None) -> None:
    """Raise InputError for a category with too few questions for an interval."""
    from mmspec.errors import InputError

    for task, items in tasks.items():
        if len(items) < 3:
            of_file = f"{prompt_file}{f', category {task!r}' if task else ''}"
            name = "--samples" if prompt_file is None else of_file
            raise InputError(name, f"{len(items)} questions", "must have at least 3 questions per category")


def compare(decoded: dict[str, list[list[int]]], plain: dict[str, list[list[int]]]) -> Json:
    """Share of answers with the tokens of plain decoding, and the first differences of the others."""
    from mmspec.evaluation.identity.comparison import first_difference
    from mmspec.evaluation.quality.intervals import proportion

    ours, theirs = ([row for rows in one.values() for row in rows] for one in (decoded, plain))
    places = [first_difference(*pair) for pair in zip(theirs, ours, strict=True)]
    found = [(index, place) for index, place in enumerate(places) if place is not None]
    return {
        "identical": proportion(len(ours) - len(found), len(ours)),
        "differences": [{"example": index, "position": place} for index, place in found],
    }


def report(rows: dict[str, Json], settings: Keywords, as_json: bool, *, wide: bool) -> None:
    """Print the figures, one row per accelerator; without `wide` at most seven columns."""
    from mmspec.evaluation.quality.intervals import jsonable
    from mmspec.evaluation.tables import MOST_COLUMNS, figures

    names = [name for name in next(iter(rows.values())) if name != "differences"]
    names, left_out = (names, []) if wide else (names[: MOST_COLUMNS - 1], names[MOST_COLUMNS - 1 :])
    cells = [[label, *(str(row[name]) for name in names)] for label, row in rows.items()]
    title = f"{settings['samples']} questions, {settings['task']}, {settings['dtype']}, {settings['device']}"
    caption = "value [95 % interval]; identical: the tokens are those of plain decoding"
    caption += f"; --wide adds {', '.join(left_out)}" if left_out else ""
    table = figures(("accelerator", *names), cells, title=title, caption=caption, caption_justify="left")
    found = [{"accelerator": label} | jsonable(row) for label, row in rows.items()]
    print_result({"settings": settings, "rows": found}, table, as_json)
