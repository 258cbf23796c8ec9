"""`mmspec evaluate drafters`: every drafter of a model on every task, and where the time goes."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from mmspec.cli.choice import parse_choice, parse_choices
from mmspec.cli.console import Interruptible, note, print_json, progress, show
from mmspec.cli.options import AsJson, BatchSize, Device, Drafter, Dtype, Model, Seed

__all__ = ["drafters"]

BLOCKS_OF_ONE = "flash:block=1"  # the same weights, drafting one token a pass


def drafters(
    model: Model = None,
    accelerators: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between, options as in flash:block=1 or flash:drafter=path/to/head.",
            show_default="none, copy, every drafter that the model names, and flash with blocks of one",
        ),
    ] = None,
    drafter: Drafter = None,
    tasks: Annotated[
        str | None,
        typer.Option(help="Of caption, describe, question, two_images, clip.", show_default="all of them"),
    ] = None,
    samples: Annotated[int, typer.Option(min=1, help="Held-out prompts of each task.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every drafter runs, in turns.")] = 3,
    max_new_tokens: Annotated[int, typer.Option(min=2, help="Most tokens of an answer.")] = 256,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    batch_size: BatchSize = 1,
    out: Annotated[Path | None, typer.Option(help="JSON file to write as well.", show_default=False)] = None,
    plot: Annotated[
        Path | None, typer.Option(help="Image of the table to write (matplotlib).", show_default=False)
    ] = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Compare drafters on one target, task by task, on the same prompts in turns.

    Says acceptance length, draft passes and parameters, the speed-up of decoding
    and that of the whole call, the share of outputs that are those of plain
    decoding, and where the time went. Rows that lose stay in.

    Example:
        mmspec evaluate drafters --samples 4 --out drafters.json --plot drafters.png
        mmspec evaluate drafters path/to/model --accelerators flash --drafter path/to/head
    """
    from mmspec.cli.bench import environment
    from mmspec.cli.loading import default_choices, load_pipeline, reference_model, with_drafter
    from mmspec.evaluation.plot import check_plot
    from mmspec.evaluation.speed.bench_record import summarise
    from mmspec.evaluation.speed.drafter_table import (
        TASKS,
        as_rows,
        count_parameters,
        drafter_report,
        draw_plot,
        task_examples,
        write_rows,
    )
    from mmspec.evaluation.speed.timing import BASELINE, batches_of, measure
    from mmspec.evaluation.text_contender import contender

    if plot is not None:
        check_plot(plot)
    source = model or reference_model()
    if accelerators is not None:
        choices = parse_choices(accelerators)
    else:
        choices = default_choices(source, drafter)
        choices += [parse_choice(BLOCKS_OF_ONE) for choice in choices if choice.label == "flash"]
    if BASELINE not in {choice.label for choice in choices}:
        choices.insert(0, parse_choice(BASELINE))
    choices = [with_drafter(choice, source, drafter) for choice in choices]
    asked = TASKS if tasks is None else [part.strip() for part in tasks.split(",")]
    batches = batches_of(task_examples(asked, samples, seed), batch_size)
    pipe = load_pipeline(source, dtype=dtype, device=device)
    contenders = {choice.label: contender(pipe, choice.name, **choice.options) for choice in choices}
    settings: dict[str, Any] = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    decoders = {label: one.decoder(seed=seed, **settings) for label, one in contenders.items()}
    runs = []
    with Interruptible() as block, progress(quiet=as_json) as bar:
        work = bar.add_task("warm-up", total=len(decoders) * len(batches) * repeats)
        for run in measure(decoders, batches, repeats, pipe.device):
            runs.append(run)
            bar.update(work, advance=1, description=f"{run.category}: {run.accelerator}")
    settings |= {"model": source, "task": "by task", "samples": samples, "repeats": repeats}
    settings |= {"batch_size": batch_size, "seed": seed, **environment(pipe)}
    own = {
        choice.label: {
            "drafter": choice.options.get("drafter"),
            "parameters": count_parameters(contenders[choice.label].accelerator),
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
        rows = as_rows(records)
        if out is not None:
            note(f"written: {write_rows(out, rows, settings)}")
        if plot is not None:
            note(f"written: {draw_plot(plot, rows)}")
        if as_json:
            print_json({"settings": settings, "rows": rows})
        else:
            show(drafter_report(records))
    block.finish()
