"""`mmspec bench`: several accelerators on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import Interruptible, line_width, note, print_json, progress, show
from mmspec.cli.options import (
    AsJson,
    BatchSize,
    Device,
    Drafter,
    Dtype,
    Images,
    JsonLines,
    Model,
    Prompts,
    Seed,
    Task,
)

if TYPE_CHECKING:
    from mmspec.cli.choice import AcceleratorChoice
    from mmspec.evaluation.bench_record import BenchRecord
    from mmspec.evaluation.speed import Run
    from mmspec.pipelines import MMSpecPipeline

__all__ = ["bench"]


def bench(
    model: Model = None,
    accelerators: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between, options as in draft_model:num_draft_tokens=8; none always runs.",
            show_default="none, copy, and draft_model where there is a drafter",
        ),
    ] = None,
    drafter: Drafter = None,
    prompts: Prompts = None,
    images: Images = None,
    jsonl: JsonLines = None,
    task: Task = "describe",
    samples: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every accelerator runs.")] = 3,
    batch_size: BatchSize = 1,
    max_new_tokens: Annotated[int, typer.Option(min=1, help="Most tokens per answer.")] = 128,
    temperature: Annotated[float, typer.Option(min=0.0, help="0 takes the likeliest token.")] = 0.0,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Time accelerators against plain decoding on the same prompts, in turns.

    Reports target forwards, acceptance length, the ratio of medians to plain
    decoding, the share of outputs that are the same, memory and more.
    Rows that lose stay in.

    Example:
        mmspec bench --accelerators none,copy,draft_model --task caption
        mmspec bench path/to/model --jsonl file.jsonl --batch-size 4 --json
    """
    from mmspec.cli.choice import parse_choice, parse_choices
    from mmspec.cli.loading import (
        choose_drafter,
        choose_examples,
        load_pipeline,
        reference_model,
        setup_options,
        takes_pictures,
    )
    from mmspec.evaluation.conversations import contender, load_pictures
    from mmspec.evaluation.speed import BASELINE, batches_of, measure

    source = model or reference_model()
    drafter = choose_drafter(source, drafter)
    if accelerators is None:
        accelerators = "none,copy" if drafter is None else "none,copy,draft_model"
    choices = parse_choices(accelerators)
    if BASELINE not in {choice.label for choice in choices}:
        choices.insert(0, parse_choice(BASELINE))
    options = {choice.label: setup_options(choice, drafter) for choice in choices}
    pipe = load_pipeline(source, dtype=dtype, device=device)
    examples = load_pictures(
        choose_examples(
            prompts,
            images,
            jsonl,
            task=task,
            samples=samples,
            seed=seed,
            takes_pictures=takes_pictures(pipe),
        )
    )
    batches = batches_of(examples, batch_size)
    settings = {"max_new_tokens": max_new_tokens, "temperature": temperature}
    decoders = {
        choice.label: contender(pipe, choice.name, **options[choice.label]).decoder(seed=seed, **settings)
        for choice in choices
    }
    runs: list[Run] = []
    with Interruptible() as block, progress(quiet=as_json) as bar:
        total = len(decoders) * len(batches) * repeats
        work = bar.add_task("warm-up", total=total)
        for run in measure(decoders, batches, repeats, pipe.device):
            runs.append(run)
            bar.update(work, advance=1, description=f"repeat {run.repeat + 1}: {run.accelerator}")
    described = {
        "model": source,
        "drafter": drafter if any(choice.needs_draft_model for choice in choices) else None,
        "task": "own prompts" if prompts or images else jsonl or task,
        "batch_size": batch_size,
        "seed": seed,
        **settings,
        **environment(pipe),
    }
    _print(runs, choices, described, as_json, block)
    block.finish()


def _print(
    runs: Sequence[Run],
    choices: Sequence[AcceleratorChoice],
    settings: dict[str, Any],
    as_json: bool,
    block: Interruptible,
) -> None:
    from mmspec.errors import InputError
    from mmspec.evaluation.bench_record import summarise
    from mmspec.evaluation.report import bench_report

    names = [choice.label for choice in choices]
    try:
        records = summarise(runs, names, settings=settings)
    except InputError:
        if not block.interrupted:
            raise
        note("nothing was finished by all accelerators")
        return
    categories = list(dict.fromkeys(run.category for run in runs))
    parts: list[BenchRecord] = []
    if len(categories) > 1 and not block.interrupted:
        parts = [record for name in categories for record in summarise(runs, names, category=name)]
    if as_json:
        print_json([_with_categories(record, parts) for record in records])
    else:
        show(bench_report(records, parts, width=line_width()))


def _with_categories(record: BenchRecord, parts: Sequence[BenchRecord]) -> dict[str, Any]:
    own = [part.as_dict() for part in parts if part.accelerator == record.accelerator]
    return {**record.as_dict(), "categories": own}


def environment(pipe: MMSpecPipeline) -> dict[str, Any]:
    """Where the figures were taken."""
    import platform

    import torch
    import transformers

    from mmspec import __version__
    from mmspec.evaluation.doctor import processor_name

    on_gpu = pipe.device.type == "cuda"
    return {
        "dtype": str(pipe.dtype).removeprefix("torch."),
        "device": str(pipe.device),
        "device_name": torch.cuda.get_device_name(pipe.device) if on_gpu else processor_name(),
        "threads": torch.get_num_threads(),
        "mmspec": __version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
        "python": platform.python_version(),
    }
