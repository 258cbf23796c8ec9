"""`mmspec bench`: several accelerators on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.console import Interruptible, line_width, note, print_json, progress, show
from mmspec.cli.options import (
    AsJson,
    BatchSize,
    Device,
    Drafter,
    Dtype,
    GuidanceScale,
    Images,
    JsonLines,
    Model,
    Prompts,
    Seed,
    Task,
    TopK,
    TopP,
)

if TYPE_CHECKING:
    from mmspec.evaluation.speed.bench_record import BenchRecord
    from mmspec.evaluation.speed.timing import Run
    from mmspec.pipelines import MMSpecPipeline

__all__ = ["bench"]

OF_WORDS = {"task": "describe", "max_new_tokens": 128, "temperature": 0.0}
OF_IMAGES = "none,sjd,gsd,lantern,zipar"


def bench(
    model: Model = None,
    accelerators: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between, options as in draft_model:num_draft_tokens=8 or "
            "flash:drafter=path/to/head; none always runs.",
            show_default="none, copy and every drafter that the model names; none,sjd,gsd,... for images",
        ),
    ] = None,
    drafter: Drafter = None,
    prompts: Prompts = None,
    images: Images = None,
    jsonl: JsonLines = None,
    task: Task = None,
    samples: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 8,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every accelerator runs.")] = 3,
    batch_size: BatchSize = 1,
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per answer.", show_default="128")
    ] = None,
    temperature: Annotated[
        float | None,
        typer.Option(min=0.0, help="0 takes the likeliest token.", show_default="0; for images the model's"),
    ] = None,
    guidance: GuidanceScale = None,
    top_k: TopK = None,
    top_p: TopP = None,
    seed: Seed = 0,
    dtype: Dtype = "auto",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Time accelerators against plain decoding on the same prompts, in turns.

    Reports target forwards, acceptance length, the ratio of medians to plain
    decoding, the share of outputs that are the same, memory and more; of
    images also the measured distance to the target's distribution. Rows that lose stay
    in.

    Example:
        mmspec bench --accelerators none,copy,draft_model --task caption
        mmspec bench --accelerators eagle,eagle:length=cost,eagle:length=confidence
        mmspec bench --accelerators none,sjd,zipar --task generate
        mmspec bench path/to/model --jsonl file.jsonl --batch-size 4 --json
    """
    from mmspec.cli.choice import parse_choice, parse_choices
    from mmspec.cli.loading import (
        REFERENCE,
        REFERENCE_IMAGE,
        default_choices,
        reference_model,
        with_drafter,
    )
    from mmspec.cli.subject import Question, load_subject
    from mmspec.evaluation.image_contender import describe_accelerator
    from mmspec.evaluation.speed.timing import BASELINE, batches_of, measure

    source = model or reference_model(REFERENCE_IMAGE if task == "generate" else REFERENCE)
    choices = [] if accelerators is None else parse_choices(accelerators)
    choices = [with_drafter(choice, source, drafter) for choice in choices]
    settings = {
        "max_new_tokens": max_new_tokens,
        "temperature": temperature,
        "guidance_scale": guidance,
        "top_k": top_k,
        "top_p": top_p,
    }
    asked = Question(task, prompts, images, jsonl, samples, seed, settings)
    subject = load_subject(source, asked, OF_WORDS, dtype=dtype, device=device)
    if not choices:
        choices = parse_choices(OF_IMAGES) if subject.draws else default_choices(source, drafter)
    if BASELINE not in {choice.label for choice in choices}:
        choices.insert(0, parse_choice(BASELINE))
    batches = batches_of(subject.examples, batch_size)
    contenders = {choice.label: subject.contender(choice) for choice in choices}
    form = {"output_type": "pt"} if subject.draws else {}
    decoders = {
        label: contender.decoder(seed=seed, **subject.settings, **form)
        for label, contender in contenders.items()
    }
    runs: list[Run] = []
    with Interruptible() as block, progress(quiet=as_json) as bar:
        total = len(decoders) * len(batches) * repeats
        work = bar.add_task("warm-up", total=total)
        for run in measure(decoders, batches, repeats, subject.pipe.device):
            runs.append(run)
            bar.update(work, advance=1, description=f"repeat {run.repeat + 1}: {run.accelerator}")
    described = {
        "model": source,
        "batch_size": batch_size,
        "seed": seed,
        **subject.described,
        **environment(subject.pipe),
    }
    own: dict[str, dict[str, Any]] = {
        choice.label: {"drafter": choice.options.get("drafter")} for choice in choices
    }
    variation = {}
    if subject.draws:
        columns = subject.pipe.target.grid.columns
        for label, one in contenders.items():
            own[label] |= describe_accelerator(one.accelerator, columns)
            variation[label] = one.measure_variation(batches[0], seed, **subject.settings)
    _print(runs, own, variation, described, as_json, block)
    block.finish()


def _print(
    runs: Sequence[Run],
    own: dict[str, dict[str, Any]],
    variation: dict[str, dict[str, float] | None],
    settings: dict[str, Any],
    as_json: bool,
    block: Interruptible,
) -> None:
    from mmspec.errors import InputError
    from mmspec.evaluation.speed.bench_record import summarise
    from mmspec.evaluation.speed.image_report import check_context, image_report
    from mmspec.evaluation.speed.report import bench_report

    names = list(own)
    try:
        records = summarise(runs, names, settings=settings, own=own)
    except InputError:
        if not block.interrupted:
            raise
        note("nothing was finished by all accelerators")
        return
    categories = list(dict.fromkeys(run.category for run in runs))
    parts: list[BenchRecord] = []
    if len(categories) > 1 and not block.interrupted:
        parts = [record for name in categories for record in summarise(runs, names, category=name)]
    draws = bool(variation)
    if draws:
        records = [replace(one, tv=variation[one.accelerator] or one.tv) for one in records]
        for record in records:
            check_context(record)
    if as_json:
        print_json([_with_categories(record, parts) for record in records])
    elif draws:
        show(image_report(records, width=line_width()))
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
    from mmspec.evaluation.machine import processor_name

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
