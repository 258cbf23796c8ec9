"""`mmspec evaluate drafters`: every drafter of a model on every task, and the parts of its time."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from mmspec.cli.choice import parse_choice
from mmspec.cli.console import Interruptible, note, print_result, progress
from mmspec.cli.loading import compared_choices, default_choices, load_pipeline, reference_model, with_drafter
from mmspec.cli.options import BatchSize, Model, ModelOptions, Plot, Table, unpack_options

__all__ = ["drafters"]

BLOCKS_OF_ONE = "flash:block=1"  # the same weights, drafting one token a pass


@unpack_options
def drafters(
    model: Model = None,
    accelerators: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between, options as in flash:block=1 or flash:drafter=path/to/head.",
            show_default="none, copy, every drafter that the model names, and flash with blocks of one",
        ),
    ] = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Of caption, describe, question, two_images, clip.", show_default="all of them"),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Held-out prompts of each task.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every drafter runs, in turns.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    batch_size: BatchSize = 1,
    out: Table = None,
    plot: Plot = None,
    *,
    how: ModelOptions,
) -> None:
    """Compare drafters on one target, task by task, on the same prompts in turns.

    Says acceptance length, draft passes and parameters, the speed-up of decoding
    and that of the whole call, the share of outputs that are those of plain
    decoding, and where the time went. Rows that lose stay in.

    Example:
        mmspec evaluate drafters --samples 4 --out drafters.json --plot drafters.png
        mmspec evaluate drafters path/to/model --accelerators flash --drafter path/to/head
    """
    from mmspec.decoding.stats import timed_by_device
    from mmspec.evaluation.contenders import contender
    from mmspec.evaluation.machine import environment
    from mmspec.evaluation.plots import check_plot
    from mmspec.evaluation.speed import drafter_table
    from mmspec.evaluation.speed.record import summarise
    from mmspec.evaluation.speed.timing import batches_of, measure
    from mmspec.pipelines import VisionLanguagePipeline

    if plot is not None:
        check_plot(plot)
    source = model or reference_model()
    if accelerators is not None:
        choices = compared_choices(accelerators, source, how.drafter)
    else:
        choices = default_choices(source, how.drafter)
        if "flash" in {choice.label for choice in choices}:
            choices.append(with_drafter(parse_choice(BLOCKS_OF_ONE), source, how.drafter))
    asked = drafter_table.TASKS if tasks is None else [part.strip() for part in tasks.split(",")]
    batches = batches_of(drafter_table.task_examples(asked, samples, how.seed), batch_size)
    pipe = load_pipeline(VisionLanguagePipeline, source, how)
    contenders = {choice.label: contender(pipe, choice.name, **choice.options) for choice in choices}
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    decoders = {label: one.decoder(seed=how.seed, **settings) for label, one in contenders.items()}
    runs = []
    with Interruptible() as block, progress(quiet=how.as_json) as bar, timed_by_device():
        work = bar.add_task("warm-up", total=len(decoders) * len(batches) * repeats)
        for run in measure(decoders, batches, repeats, pipe.device):
            runs.append(run)
            bar.update(work, advance=1, description=f"{run.category}: {run.accelerator}")
    settings |= {"model": source, "task": "by task", "samples": samples, "repeats": repeats}
    settings |= {"batch_size": batch_size, "seed": how.seed, **environment(pipe.device, pipe.dtype)}
    own = {
        choice.label: {
            "drafter": choice.options.get("drafter"),
            "parameters": drafter_table.count_parameters(contenders[choice.label].accelerator),
        }
        for choice in choices
    }
    finished = dict.fromkeys(run.category for run in runs if run.accelerator == choices[-1].label)
    records = [
        record
        for task in finished
        for record in summarise(runs, list(own), category=task, settings=settings, own=own)
    ]
    if not records:
        note("nothing was finished by all drafters")
    else:
        rows = drafter_table.as_rows(records)
        if out is not None:
            note(f"written: {drafter_table.write_rows(out, rows, settings)}")
        if plot is not None:
            note(f"written: {drafter_table.draw_plot(plot, rows)}")
        print_result({"settings": settings, "rows": rows}, drafter_table.drafter_report(records), how.as_json)
    block.finish()
