"""`mmspec bench`: several accelerators on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.cli.choice import AcceleratorChoice, parse_choices
from mmspec.cli.console import Interruptible, line_width, note, print_result, progress
from mmspec.cli.loading import compared_choices, default_choices, own_drafters
from mmspec.cli.options import ModelOptions, TopK, TopP, unpack_options
from mmspec.cli.subject import Question, Subject, image_accelerators, load_subject
from mmspec.errors import InputError

if TYPE_CHECKING:
    from mmspec.evaluation.examples import Example
    from mmspec.evaluation.speed.bench_record import BenchRecord
    from mmspec.evaluation.speed.peers import Peers
    from mmspec.evaluation.speed.timing import TimedRun

__all__ = ["bench"]

TEXT_DEFAULTS = {"task": "describe", "max_new_tokens": 128, "temperature": 0.0}


@dataclass(frozen=True, kw_only=True)
class BenchQuestion(Question):
    """The options of `mmspec bench` that say what the model is asked."""

    top_k: TopK = None
    top_p: TopP = None


@unpack_options
def bench(
    accelerators: Annotated[
        str | None,
        typer.Option(
            help="Names with commas between, options as in draft_model:num_draft_tokens=8 or "
            "flash:drafter=path/to/head; none always runs.",
            show_default="none, copy and every drafter that the model names; none,sjd,gsd,... for images",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Times that every accelerator runs.")] = 3,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Time transformers' own generate as well: plain, look-up, assisted, MTP."
        ),
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Time every accelerator with compiled steps as well (pipe.compile)."),
    ] = False,
    *,
    asked: BenchQuestion,
    how: ModelOptions,
) -> None:
    """Time accelerators against plain decoding on the same prompts, in turns.

    Reports target forwards, acceptance length, the ratio of medians to plain
    decoding, the share of outputs that are the same, memory, where the time goes,
    and more; of images also the measured distance to the target's distribution. Rows that lose stay
    in.

    Example:
        mmspec bench --accelerators none,copy,draft_model --task caption
        mmspec bench --accelerators eagle,eagle:length=cost,eagle:length=confidence
        mmspec bench --accelerators none,sjd,zipar --task generate
        mmspec bench --accelerators none,copy,draft_model,flash --peers --compile
        mmspec bench path/to/model --prompt-file prompts.jsonl --batch-size 4 --json
    """
    from mmspec.decoding.laps import timed_by_device
    from mmspec.evaluation.image_contender import describe_accelerator
    from mmspec.evaluation.machine import environment
    from mmspec.evaluation.speed.timing import batches_of, measure

    source = asked.source
    choices = None if accelerators is None else compared_choices(accelerators, source, how.drafter)
    subject = load_subject(source, asked, how, TEXT_DEFAULTS)
    if choices is None and subject.draws:
        choices = parse_choices(",".join(["none", *image_accelerators(subject.pipe.target)]))
    choices = choices or default_choices(source, how.drafter)
    batches = batches_of(subject.examples, asked.batch_size)
    contenders = {choice.label: subject.contender(choice) for choice in choices}
    drafters = {choice.label: choice.options.get("drafter") for choice in choices}
    if compiled:
        subject.pipe.compile((asked.batch_size,))
        for choice in choices:
            label = f"{choice.label}, compiled"
            contenders[label], drafters[label] = subject.contender(choice), drafters[choice.label]
    form = {"output_type": "pt"} if subject.draws else {}
    decoders = {
        label: contender.decoder(seed=how.seed, **subject.settings, **form)
        for label, contender in contenders.items()
    }
    others: Peers | None = None
    if peers:
        others = _peers(subject, batches[0], source, choices, contenders)
        decoders |= others.decoders
    runs: list[TimedRun] = []
    with Interruptible() as block, progress(quiet=how.as_json) as bar, timed_by_device():
        work = bar.add_task("warm-up", total=len(decoders) * len(batches) * repeats)
        for run in measure(decoders, batches, repeats, subject.pipe.device):
            runs.append(run)
            bar.update(work, advance=1, description=f"repeat {run.repeat + 1}: {run.accelerator}")
    described = {"model": source, "batch_size": asked.batch_size, "seed": how.seed, **subject.described}
    described |= environment(subject.pipe.device, subject.pipe.dtype)
    own: dict[str, dict[str, Any]] = {label: {"drafter": drafter} for label, drafter in drafters.items()}
    if others is not None:
        described["peers_missing"] = others.missing
        own |= {name: {"drafter": None, "window": 1, "promise": "exact"} for name in others.decoders}
    variation = {}
    if subject.draws:
        for label, one in contenders.items():
            own[label] |= describe_accelerator(one.accelerator)
            variation[label] = one.measure_variation(batches[0], how.seed, **subject.settings)
    _print(runs, own, variation, described, how.as_json, block)
    block.finish()


def _peers(
    subject: Subject,
    batch: Sequence[Example],
    source: str,
    choices: Sequence[AcceleratorChoice],
    contenders: Mapping[str, Any],
) -> Peers:
    """Ways of transformers; their assistant is the draft model that is timed, or the model's own."""
    from mmspec.evaluation.speed.peers import image_peers, text_peers

    if subject.draws:
        return image_peers(subject.pipe, batch, **subject.settings)
    drafting = [contenders[one.label] for one in choices if one.name == "draft_model"]
    named = [one for one in own_drafters(source).values() if one.name == "draft_model"]
    drafting += [subject.contender(one) for one in named[: not drafting]]
    assistant = drafting[0].accelerator.drafter.model.model if drafting else None
    return text_peers(subject.pipe, batch, assistant, **subject.settings)


def _print(
    runs: Sequence[TimedRun],
    own: dict[str, dict[str, Any]],
    variation: dict[str, dict[str, float] | None],
    settings: dict[str, Any],
    as_json: bool,
    block: Interruptible,
) -> None:
    from rich.console import Group

    from mmspec.evaluation.speed.bench_record import summarise
    from mmspec.evaluation.speed.image_report import image_report
    from mmspec.evaluation.speed.report import bench_report, peer_table

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
    missing = settings.get("peers_missing")
    if variation:
        records = [replace(one, tv=variation.get(one.accelerator) or one.tv) for one in records]
    by_name = {name: [part.as_dict() for part in parts if part.accelerator == name] for name in names}
    value = [{**record.as_dict(), "categories": by_name[record.accelerator]} for record in records]
    width = line_width()
    shown = image_report(records, width=width) if variation else bench_report(records, parts, width=width)
    if missing is not None:
        shown = Group(shown, peer_table(records, missing))
    print_result(value, shown, as_json)
