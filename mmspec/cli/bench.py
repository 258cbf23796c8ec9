"""`mmspec bench`: several accelerators on the same prompts in one run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from mmspec.cli.choice import AcceleratorChoice, parse_choices
from mmspec.cli.console import Interruptible, line_width, note, print_result, progress
from mmspec.cli.loading import compared_choices, default_choices, own_drafters
from mmspec.cli.options import AsJson, ModelOptions, TopK, TopP, unpack_options
from mmspec.cli.subject import Question, Subject, image_accelerators, load_subject
from mmspec.errors import InputError

if TYPE_CHECKING:
    from mmspec.evaluation.examples import Example
    from mmspec.evaluation.speed.html_report import Sample
    from mmspec.evaluation.speed.peers import Peers
    from mmspec.evaluation.speed.record import BenchRecord
    from mmspec.evaluation.speed.timing import TimedRun

__all__ = ["bench_app"]

SAMPLES = 3  # in a report
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
    html: Annotated[
        Path | None,
        typer.Option(help="Write a report with plots and samples, in one HTML file.", show_default=False),
    ] = None,
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder for result lines as Spec-Bench and MMSpec have them, a file for each accelerator.",
            show_default=False,
        ),
    ] = None,
    *,
    asked: BenchQuestion,
    how: ModelOptions,
) -> None:
    """Time accelerators against plain decoding on the same prompts, in turns.

    Reports target forwards, acceptance length, the ratio of medians to plain
    decoding, the share of outputs that are the same, memory, where the time goes,
    and more; of images also the measured distance to the target's distribution. Rows
    that lose stay in. `mmspec bench compare` compares two results of --json.

    Example:
        mmspec bench --accelerators none,copy,draft_model --task caption
        mmspec bench --accelerators eagle,eagle:length=cost,eagle:length=confidence
        mmspec bench --accelerators none,sjd,zipar --task generate
        mmspec bench --accelerators none,copy,draft_model,flash --peers --compile
        mmspec bench --prompt-file assets/prompts/mmspec/mmspec.jsonl --html report.html --results lines
        mmspec bench path/to/model --prompt-file prompts.jsonl --batch-size 4 --json
    """
    from mmspec.decoding.stats import timed_by_device
    from mmspec.evaluation.contenders import describe_accelerator
    from mmspec.evaluation.machine import environment
    from mmspec.evaluation.speed.timing import batches_of, measure

    check_files(html, results, asked.batch_size)
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
    records = _print(runs, own, variation, described, how.as_json, block)
    if records and html is not None:
        from mmspec.evaluation.speed.html_report import write_html

        write_html(html, records, samples_of(subject, contenders, runs, batches, how.seed))
        note(f"report: {html}")
    if records and results is not None:
        from mmspec.evaluation.speed.result_lines import write_result_lines

        decode = (
            (lambda tokens: "")
            if subject.draws
            else partial(subject.pipe.tokenizer.decode, skip_special_tokens=True)
        )
        write_result_lines(results, list(own), runs, batches, decode)
        note(f"result lines: {results}")
    block.finish()


def check_files(html: Path | None, results: Path | None, batch_size: int) -> None:
    """Check what is to be written before anything is measured.

    Raises:
        InputError: a folder that is not there, or results of batches.
        MissingDependencyError: matplotlib, which the report needs, is not installed.
    """
    from mmspec.evaluation.plots import check_plot

    if html is not None and not check_plot(html).parent.is_dir():
        raise InputError("--html", str(html), "a file in a folder that exists")
    if results is not None and batch_size != 1:
        raise InputError("--results", str(results), "--batch-size 1: lines have a time for each prompt")


def samples_of(
    subject: Subject,
    contenders: Mapping[str, Any],
    runs: Sequence[TimedRun],
    batches: Sequence[Sequence[Example]],
    seed: int,
) -> list[Sample]:
    """The first prompts with what every accelerator made of them; images are drawn once more for it."""
    from mmspec.evaluation.contenders import subject_of
    from mmspec.evaluation.speed.html_report import Sample
    from mmspec.media import load_image

    firsts = [run for run in runs if run.repeat == 0 and run.accelerator in contenders]
    found = []
    for index, batch in enumerate(batches[:SAMPLES]):
        example, outputs = batch[0], {}
        for name, contender in contenders.items():
            if subject.draws:
                prompt, what = subject_of([example])
                drawn = contender.enter()(prompt, **what, seed=seed, output_type="pil", **subject.settings)
                outputs[name] = drawn.images[0]
            else:
                run = next(one for one in firsts if (one.accelerator, one.batch) == (name, index))
                outputs[name] = subject.pipe.tokenizer.decode(run.decoded.tokens[0], skip_special_tokens=True)
        images = [load_image(image) for image in example.images]
        found.append(Sample(" / ".join(example.turns), images, outputs))
    return found


def compare(
    before: Annotated[Path, typer.Argument(help="A result of mmspec bench --json.")],
    after: Annotated[Path, typer.Argument(help="A later one, of the same prompts and settings.")],
    as_json: AsJson = False,
) -> None:
    """Compare two benches: by their speed-ups, which do not depend on how fast the machine was.

    Example:
        mmspec bench --json > before.json
        mmspec bench compare before.json after.json
    """
    from mmspec.evaluation.speed.bench_comparison import compare_benches
    from mmspec.evaluation.speed.html_report import with_interval
    from mmspec.evaluation.tables import figures

    found, told = compare_benches(before, after)
    verdicts = {True: "differs", False: "within the intervals", None: "no intervals"}
    rows = [
        (
            one.accelerator,
            with_interval(one.before, one.before_interval, "x"),
            with_interval(one.after, one.after_interval, "x"),
            f"{one.ratio:.2f}x",
            f"{one.seconds_ratio:.2f}x",
            verdicts[one.differs],
            "yes" if one.same_figures else "no",
        )
        for one in found
    ]
    columns = ("accelerator", "before", "after", "ratio", "seconds", "verdict", "same forwards")
    for line in told:
        note(f"differs: {line}")
    value = {"compared": [one.as_dict() for one in found], "differs": told}
    print_result(value, figures(columns, rows, title=f"{before} and {after}"), as_json)


class WithDefault(TyperGroup):
    """A group whose first command runs where none is named, so that `mmspec bench MODEL` stays as it is."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Name the first command unless another one is."""
        default, *others = self.commands
        return super().parse_args(ctx, args if args and args[0] in others else [default, *args])


bench_app = typer.Typer(cls=WithDefault, help="Time accelerators, and compare results.")
bench_app.command("run")(bench)
bench_app.command("compare")(compare)


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
) -> list[BenchRecord]:
    """Print the records of all accelerators, and return them; none where nothing was finished."""
    from rich.console import Group

    from mmspec.evaluation.speed.image_report import image_report
    from mmspec.evaluation.speed.record import summarise
    from mmspec.evaluation.speed.report import bench_report, peer_table

    names = list(own)
    try:
        records = summarise(runs, names, settings=settings, own=own)
    except InputError:
        if not block.interrupted:
            raise
        note("nothing was finished by all accelerators")
        return []
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
    return records
