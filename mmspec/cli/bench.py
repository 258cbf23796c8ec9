"""`mmspec bench`: times several accelerators on the same prompts in one run."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from mmspec.cli.compared import ALL, Search, default_groups, find_best, groups_of
from mmspec.cli.console import Interruptible, note, print_result, progress
from mmspec.cli.help_text import Command
from mmspec.cli.loading import AcceleratorChoice, own_drafters
from mmspec.cli.options import AsJson, ModelOptions, Plot, Table, TopK, TopP, Wide, unpack_options
from mmspec.cli.subject import Question, Subject, load_subject
from mmspec.errors import InputError, MissingDependencyError
from mmspec.open_types import Keywords

if TYPE_CHECKING:
    from rich.console import RenderableType

    from mmspec.evaluation.contenders import Contender
    from mmspec.evaluation.examples import Example
    from mmspec.evaluation.quality.image_scores import Scorer
    from mmspec.evaluation.speed.peers import Peers
    from mmspec.evaluation.speed.plots import Sample
    from mmspec.evaluation.speed.record import Record
    from mmspec.evaluation.speed.timing import TimedRun

__all__ = ["bench_app"]

SAMPLES = 3  # in a report
TEXT_DEFAULTS = {"task": "describe", "max_new_tokens": 128, "temperature": 0.0}


@dataclass(frozen=True, kw_only=True)
class BenchQuestion(Question):
    """Options of `mmspec bench` for the model and its prompts."""

    top_k: TopK = None
    top_p: TopP = None


@dataclass(frozen=True, kw_only=True)
class Files:
    """The files that a bench writes."""

    out: Table = None
    plot: Plot = None
    html: Annotated[
        Path | None, typer.Option(help="Write a report with plots and samples, in one HTML file.")
    ] = None
    results: Annotated[
        Path | None,
        typer.Option(
            help="Folder for result lines in the format of Spec-Bench and MMSpec, one file per accelerator."
        ),
    ] = None

    def check(self, batch_size: int) -> None:
        """Check the output files before anything is measured.

        Raises:
            InputError: a folder does not exist, or `results` is set for batches.
            MissingDependencyError: the report or the plot needs matplotlib, which is not installed.
        """
        from mmspec.evaluation.tables import check_plot

        for name, path in (("--html", self.html), ("--plot", self.plot)):
            if path is not None and not check_plot(path).parent.is_dir():
                raise InputError(name, str(path), "must be a file in a folder that exists")
        if self.results is not None and batch_size != 1:
            rule = "needs --batch-size 1, because each line has the time of one prompt"
            raise InputError("--results", str(self.results), rule)


@unpack_options
def bench(
    accelerator: Annotated[
        str | None,
        typer.Option(
            help="Names separated by commas, with options as in draft_model:num_draft_tokens=8 or "
            "flash:drafter=path/to/head. For several values, as in sjd:window=8|16, the best value on "
            "other prompts is compared. none always runs; all (images) selects every method at its best.",
            show_default="none, copy, ... or for images none, sjd, ...; and drafters of the model's folder",
        ),
    ] = None,
    repeats: Annotated[int, typer.Option(min=1, help="Number of repeats per accelerator.")] = 3,
    quality: Annotated[
        bool,
        typer.Option(
            "--quality",
            help="Score the images too: attributes, and distance to plain decoding, by the network in "
            "reader/ of the model's folder or of assets/scenes-llamagen, which was trained on scenes only.",
        ),
    ] = False,
    peers: Annotated[
        bool,
        typer.Option(
            "--peers", help="Time generate of transformers as well: plain, prompt look-up, assisted, MTP."
        ),
    ] = False,
    compiled: Annotated[
        bool,
        typer.Option("--compile", help="Time every accelerator, and generate, with torch.compile as well."),
    ] = False,
    wide: Wide = False,
    *,
    asked: BenchQuestion,
    searched: Search,
    files: Files,
    how: ModelOptions,
) -> None:
    """Time accelerators against plain decoding on the same prompts, in turns.

    Reports the share of identical outputs, tokens per forward pass, the speed-up
    with its interval, memory, and the parts of the time; for several tasks also by
    task. For images it reports forward passes and the measured distance to the
    target's distribution, and with --quality scores of the images; for recordings,
    the word error rate. --wide prints further columns. `mmspec bench compare`
    compares two results of --json.

    Example:
        mmspec bench --accelerator none,copy,draft_model --task caption
        mmspec bench --accelerator eagle,eagle:length=cost,eagle:length=confidence
        mmspec bench --task all --out drafters.json --plot drafters.png
        mmspec bench --task generate --accelerator 'none,sjd:window=8|16,zipar' --samples 16 --quality
        mmspec bench --accelerator none,copy,draft_model,flash --peers --compile
        mmspec bench --prompt-file assets/prompts/mmspec/mmspec.jsonl --html report.html --results lines
        mmspec bench path/to/model --prompt-file path/to/question.jsonl --batch-size 4 --json
        mmspec bench openai/whisper-tiny.en --prompt-file path/to/recordings.jsonl
        mmspec bench compare before.json after.json
    """
    source = asked.announce()
    from mmspec.core.statistics import timed_by_device
    from mmspec.evaluation.contenders import count_parameters, describe_accelerator
    from mmspec.evaluation.speed.plots import draw_bench
    from mmspec.evaluation.speed.record import as_json
    from mmspec.evaluation.speed.timing import batches_of, measure

    files.check(asked.batch_size)
    named = accelerator not in (None, ALL)
    # raises for unknown names, before the model is loaded
    groups = groups_of(str(accelerator), source, how.drafter) if named else []
    subject = load_subject(source, asked, how, TEXT_DEFAULTS, speech=True)
    for option, is_given in (("--peers", peers), ("--compile", compiled)):
        if subject.hears and is_given:
            raise InputError(option, True, "must be left out for speech models")
    scorer = load_scorer(subject, source) if quality else None
    if subject.draws:
        subject = replace(subject, form={"output_type": "pil" if quality else "pt"})
    groups = groups or default_groups(accelerator, subject, source, how.drafter)
    choices, tried = find_best(groups, subject, searched, asked.batch_size, how)
    batches = batches_of(subject.examples, asked.batch_size)
    contenders = {choice.label: subject.contender(choice) for choice in choices}
    own: dict[str, Keywords] = {}
    for choice in choices:
        made, others = contenders[choice.label].accelerator, tried.get(choice.label)
        about = {"drafter": choice.options.get("drafter"), "parameters": count_parameters(made)}
        about |= describe_accelerator(made) if subject.draws else {}
        own[choice.label] = about | ({"searched": len(others)} if others else {})
    if compiled:
        subject.pipe.compile((asked.batch_size,))
        for choice in choices:
            label = f"{choice.label}, compiled"
            contenders[label], own[label] = subject.contender(choice), own[choice.label]
    settings = {**subject.settings, **subject.form}
    decoders = {label: one.decoder(seed=how.seed, **settings) for label, one in contenders.items()}
    described = subject.conditions(source, asked.batch_size, how.seed)
    if tried:
        figures = {label: one for each in tried.values() for label, one in each.items()}
        where = {"search_file": searched.search_file and str(searched.search_file)}
        described |= {**vars(searched), **where, "tried": figures}
    if peers:
        ways = find_peers(subject, batches[0], source, choices, contenders, compiled)
        decoders |= ways.decoders
        described["peers_missing"] = ways.missing
        idle = {"drafter": None, "parameters": 0, "window": 1, "promise": "exact"}
        own |= {name: dict(idle) for name in ways.decoders}
    runs: list[TimedRun] = []
    with Interruptible() as block, progress(quiet=how.as_json) as bar, timed_by_device():
        work = bar.add_task("warm-up", total=len(decoders) * len(batches) * repeats)
        for run in measure(decoders, batches, repeats, subject.pipe.device):
            is_read = quality and run.repeat == 0
            runs.append(run if is_read else replace(run, decoded=replace(run.decoded, images=())))
            bar.update(work, advance=1, description=f"repeat {run.repeat + 1}: {run.accelerator}")
    records, parts = summarised(runs, own, described, block)
    if not records:
        note("no prompt was finished by all accelerators")
        block.finish()
    if subject.draws:
        seen = batches if quality else batches[:1]
        found = {label: one.watch(seen, how.seed, **subject.settings) for label, one in contenders.items()}
        records = [replace(one, **found.get(one.accelerator, {})) for one in records]
    if scorer is not None and not block.interrupted:
        records = with_quality(records, runs, batches, subject, contenders, scorer, how.seed)
    if subject.hears:
        records = with_word_errors(records, runs, batches, subject)
    value = as_json([*records, *parts])
    print_result(value, shown(records, parts, subject.draws, wide=wide), how.as_json)
    if files.out is not None:
        files.out.write_text(json.dumps(value, indent=1) + "\n")
        note(f"written: {files.out}")
    if files.plot is not None:
        note(f"written: {draw_bench(files.plot, records, parts)}")
    if files.html is not None:
        from mmspec.evaluation.speed.plots import html_report

        samples = samples_of(subject, contenders, runs, batches, how.seed)
        page = html_report(records, shown(records, parts, subject.draws, wide=True), samples)
        files.html.write_text(page, encoding="utf-8")
        note(f"report: {files.html}")
    if files.results is not None:
        from mmspec.evaluation.speed.bench_files import write_result_lines

        def decode(tokens: Sequence[int]) -> str:
            return "" if subject.draws else subject.decode(tokens)

        write_result_lines(files.results, list(own), runs, batches, decode)
        note(f"result lines: {files.results}")
    block.finish()


def find_peers(
    subject: Subject,
    batch: Sequence[Example],
    source: str,
    choices: Sequence[AcceleratorChoice],
    contenders: Mapping[str, Contender],
    compiled: bool,
) -> Peers:
    """Decoders of transformers; the assistant is the draft model that is timed, or of the model's folder."""
    from mmspec.evaluation.speed.peers import image_peers, text_peers

    if subject.draws:
        return image_peers(subject.pipe, batch, **subject.settings)
    drafting = [contenders[one.label] for one in choices if one.name == "draft_model"]
    named = [one for one in own_drafters(source).values() if one.name == "draft_model"]
    drafting += [subject.contender(one) for one in named[: not drafting]]
    assistant = drafting[0].accelerator.drafter.model.model if drafting else None
    return text_peers(subject.pipe, batch, assistant, compiled, **subject.settings)


def summarised(
    runs: Sequence[TimedRun], own: dict[str, Keywords], settings: Keywords, block: Interruptible
) -> tuple[list[Record], list[Record]]:
    """Records of all prompts, and of each category if there are several; none if interrupted early."""
    from mmspec.evaluation.speed.record import summarise

    how: Keywords = {"settings": settings, "own": own}
    try:
        records = summarise(runs, list(own), **how)
    except InputError:
        if not block.interrupted:
            raise
        return [], []
    categories = list(dict.fromkeys(run.category for run in runs))
    if len(categories) == 1 or block.interrupted:
        return records, []
    return records, [one for name in categories for one in summarise(runs, list(own), category=name, **how)]


def load_scorer(subject: Subject, source: str) -> Scorer:
    """Load the network that scores images of scenes."""
    from mmspec.evaluation.quality.attributes import AttributeJudge, scenes_network
    from mmspec.evaluation.quality.image_scores import Scorer

    if not subject.draws:
        rule = "must be left out for models that generate text; mmspec evaluate text scores answers"
        raise InputError("--quality", True, rule)
    if len(subject.examples) < 3:
        raise InputError(
            "--samples", len(subject.examples), "must be at least 3 with --quality, for an interval"
        )
    judge = AttributeJudge.of_model(source)
    return Scorer(scenes_network(judge), judge)


def with_quality(
    records: Sequence[Record],
    runs: Sequence[TimedRun],
    batches: Sequence[Sequence[Example]],
    subject: Subject,
    contenders: Mapping[str, Contender],
    scorer: Scorer,
    seed: int,
) -> list[Record]:
    """Add scores of the images of the first repeat; the reference is plain decoding with other seeds."""
    from mmspec.evaluation.examples import OTHER_SEEDS
    from mmspec.evaluation.quality.image_scores import score_drawings
    from mmspec.evaluation.quality.intervals import jsonable

    firsts = sorted((run for run in runs if run.repeat == 0), key=lambda run: run.batch)
    drawn = {name: [run.decoded for run in firsts if run.accelerator == name] for name in contenders}
    decode = contenders["none"].decoder(seed=seed + OTHER_SEEDS, **subject.settings, **subject.form)
    prompts = [example.only_turn() for batch in batches for example in batch]
    target = subject.pipe.target
    codes = None if target.vector_size else target.layout_of(target.grid).codes
    found = score_drawings(drawn, list(map(decode, batches)), prompts, codes, scorer)
    return [
        replace(one, quality=jsonable(found[one.accelerator])) if one.accelerator in found else one
        for one in records
    ]


def with_word_errors(
    records: Sequence[Record],
    runs: Sequence[TimedRun],
    batches: Sequence[Sequence[Example]],
    subject: Subject,
) -> list[Record]:
    """Add the word error rate of the recordings with known words; a note says if jiwer is not installed."""
    from mmspec.evaluation.quality.text_scores import word_error_rate

    firsts = [run for run in runs if run.repeat == 0]
    found = []
    for record in records:
        pairs = [
            (example.transcript, subject.decode(tokens))
            for run in firsts
            if run.accelerator == record.accelerator
            for example, tokens in zip(batches[run.batch], run.decoded.tokens, strict=True)
            if example.transcript
        ]
        try:
            rate = word_error_rate(*zip(*pairs, strict=True)) if pairs else None
        except MissingDependencyError as error:
            note(str(error))
            return list(records)
        found.append(replace(record, word_error_rate=rate))
    return found


def shown(records: Sequence[Record], parts: Sequence[Record], draws: bool, *, wide: bool) -> RenderableType:
    """The records as tables."""
    from rich.console import Group

    from mmspec.evaluation.speed.report import bench_report, image_report, peer_table

    table = image_report(records, wide=wide) if draws else bench_report(records, parts, wide=wide)
    missing = records[0].settings.get("peers_missing")
    return table if missing is None else Group(table, peer_table(records, missing))


def samples_of(
    subject: Subject,
    contenders: Mapping[str, Contender],
    runs: Sequence[TimedRun],
    batches: Sequence[Sequence[Example]],
    seed: int,
) -> list[Sample]:
    """The first prompts with the outputs of every accelerator; images are generated again."""
    from mmspec.evaluation.contenders import subject_of
    from mmspec.evaluation.speed.plots import Sample
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
                outputs[name] = subject.decode(run.decoded.tokens[0])
        images = [load_image(image) for image in example.images]
        asked = " / ".join(example.turns) or example.identifier
        found.append(Sample(asked, images, outputs))
    return found


def compare(
    before: Annotated[Path, typer.Argument(metavar="BEFORE", help="A result of mmspec bench --json.")],
    after: Annotated[
        Path, typer.Argument(metavar="AFTER", help="A later result, of the same prompts and settings.")
    ],
    as_json: AsJson = False,
) -> None:
    """Compare two results by their speed-ups, which do not depend on the speed of the machine.

    Example:
        mmspec bench compare before.json after.json
    """
    from mmspec.evaluation.speed.bench_files import compare_benches
    from mmspec.evaluation.tables import figures, with_interval

    found, differences = compare_benches(before, after)
    verdicts = {True: "differs", False: "within the intervals", None: "no intervals"}
    rows = []
    for one in found:
        earlier = with_interval(one.before, one.before_interval, "x")
        later = with_interval(one.after, one.after_interval, "x")
        ratios = f"{one.ratio:.2f}x", f"{one.seconds_ratio:.2f}x"
        same = "yes" if one.same_figures else "no"
        rows.append((one.accelerator, earlier, later, *ratios, verdicts[one.differs], same))
    columns = ("accelerator", "before", "after", "ratio", "seconds", "verdict", "same counts")
    for line in differences:
        note(f"differs: {line}")
    value = {"compared": list(map(vars, found)), "differs": differences}
    print_result(value, figures(columns, rows, title=f"{before} and {after}"), as_json)


class WithDefault(TyperGroup):
    """A group whose first command is the default, so that `mmspec bench MODEL` works."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Insert the first command unless another is given."""
        default, *others = self.commands
        return super().parse_args(ctx, args if args and args[0] in others else [default, *args])


bench_app = typer.Typer(cls=WithDefault, help="Time accelerators, and compare results.")
bench_app.command("run", cls=Command)(bench)
bench_app.command("compare", cls=Command)(compare)
