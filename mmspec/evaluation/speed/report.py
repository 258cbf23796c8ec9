"""Tables of a bench for the terminal and the HTML report."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmspec.call_fields import NO_TRUNCATION
from mmspec.evaluation.speed.record import Record
from mmspec.evaluation.speed.timing import BASELINE
from mmspec.evaluation.tables import figures

__all__ = ["COLUMNS", "IMAGE_COLUMNS", "bench_report", "image_report", "peer_table"]

PARTS_EXPLAINED = (
    "prompt: prefill; target: scoring; draft: the drafter; verify: sampler, acceptance rule and commit; "
    "rest: loop, canvas and pipeline"
)


def speedup(record: Record) -> str:
    """Render the speed-up with its interval over prompts, or with the extremes of repeats."""
    ends = record.speedup_interval or (record.speedup_min, record.speedup_max)
    return f"{record.speedup:.2f}x ({ends[0]:.2f}-{ends[1]:.2f})"


def median_prompt(record: Record) -> str:
    """Render the median speed-up of single prompts."""
    return "-" if record.over_plain is None else f"{record.over_plain['median']:.2f}x"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def word_errors(record: Record) -> str:
    """Render the word error rate of transcripts."""
    return "-" if record.word_error_rate is None else f"{record.word_error_rate:.1%}"


def _variation(record: Record, which: str) -> str:
    measured = record.tv or record.drift
    return "-" if measured is None else f"{measured[which]:.3f}"


#: Header, the figure of a record, and whether it is shown without --wide: at most six, beside the name.
Columns = Sequence[tuple[str, Callable[[Record], str], bool]]

FIRST_TOKEN = ("first\ntoken", lambda record: f"{1000 * record.time_to_first_token:.0f} ms", True)
WORD_ERRORS = ("word\nerrors", word_errors, True)  # shown instead, for speech
COLUMNS: Columns = (
    ("promise", lambda record: record.exactness, True),
    ("identical", lambda record: f"{record.identical:.0%}", True),
    ("tokens", lambda record: str(record.new_tokens), False),
    ("forward\npasses", lambda record: str(record.target_forwards), False),
    ("tokens/\npass", lambda record: f"{record.acceptance_length:.2f}", True),
    ("accepted", lambda record: f"{record.acceptance_rate:.0%}", False),
    ("tokens/s", lambda record: f"{record.tokens_per_second:.0f}", False),
    ("speed-up\n(interval)", speedup, True),
    ("median\nprompt", median_prompt, False),
    ("decoding\nalone", lambda record: f"{record.decode_speedup:.2f}x", False),
    FIRST_TOKEN,
    WORD_ERRORS,
    ("J/token", lambda record: _or_dash(record.joules_per_token), False),
    ("peak\nmemory", lambda record: f"{record.peak_memory_bytes / 1e6:.0f} MB", True),
)
IMAGE_COLUMNS: Columns = (
    ("promise", lambda record: str(record.own["promise"]), True),
    ("window", lambda record: str(record.own["window"]), False),
    ("same", lambda record: f"{record.identical:.0%}", False),
    ("forward\npasses", lambda record: f"{record.nfe_mean:.1f}", True),
    ("most", lambda record: str(record.nfe_max), False),
    ("times\nfewer", lambda record: f"{record.step_compression:.2f}x", True),
    ("tokens/\npass", lambda record: f"{record.acceptance_length:.2f}", False),
    ("tv or\ndrift", lambda record: _variation(record, "mean"), True),
    ("its\nmax", lambda record: _variation(record, "max"), False),
    ("speed-up\n(interval)", speedup, True),
    ("with\npixels", lambda record: f"{record.speedup_with_pixels:.2f}x", True),
    ("state", lambda record: f"{record.state_bytes / 1e6:.1f} MB", False),
)


def bench_report(
    records: Sequence[Record], by_category: Sequence[Record] = (), *, wide: bool = False
) -> RenderableType:
    """Render the records as a table, with the settings above and an explanation below.

    Args:
        records: one record per accelerator, over all prompts.
        by_category: one record per category and accelerator.
        wide: whether to show all columns; without it tables have at most seven, and the others are listed.
    """
    hears = records[0].word_error_rate is not None
    columns = [column for column in COLUMNS if column is not (FIRST_TOKEN if hears else WORD_ERRORS)]
    told = "word errors: word error rate" if hears else "first token: time to it"
    explained = (
        "tokens/pass: tokens per forward pass, bonus tokens included; plain decoding has 1. speed-up: ratio "
        f"to none in this run, of medians over {records[0].repeats} interleaved repeats, with its 95 % "
        "bootstrap interval over prompts (the extremes of repeats for fewer than three prompts). "
        f"{told}. peak memory: {records[0].memory_kind}. Parts of the time: {PARTS_EXPLAINED}."
    )
    if wide:
        explained += (
            " accepted: share of draft tokens. median prompt: median speed-up of single prompts. decoding "
            "alone: speed-up without prefill."
        )
    more = [_category_table(by_category, wide)] if by_category else []
    return _framed(records, columns, wide, _settings(records[0]), explained, more)


def image_report(records: Sequence[Record], *, wide: bool = False) -> RenderableType:
    """Render the records of images; arguments as in `bench_report`.

    Raises:
        KeyError: a record lacks a setting on which its speed-up depends.
    """
    settings = records[0].settings
    if "num_inference_steps" in settings:
        cuts = [
            f"{settings['num_inference_steps']} steps of the head",
            f"guidance {settings['guidance_schedule']}",
        ]
    else:
        cuts = [
            f"{name.replace('_', '-')} {'off' if settings[name] in (None, neutral) else settings[name]}"
            for name, neutral in NO_TRUNCATION.items()
        ]
    sampling = [f"guidance {settings['guidance_scale']:g}", f"temperature {settings['temperature']:g}", *cuts]
    explained = (
        "forward passes: mean per image, prefill included; a guided pair counts once. times fewer: ratio of "
        "plain decoding's forward passes to these. tv: measured total variation distance to the target, mean "
        "over verified places (for vectors drift: distance of accepted candidates to the target's own "
        "samples); - if not measured. speed-up: ratio of "
        f"medians over {records[0].repeats} interleaved repeats to {settings['baseline']}, without and "
        f"with the time of pixels. Parts of the time, without pixels: {PARTS_EXPLAINED}."
    )
    if wide:
        explained += " same: share of images with the tokens of plain decoding. state: keys and values."
    above = f"{_settings(records[0])} | {', '.join(sampling)}"
    more = [_quality_table(records, wide)] if records[0].quality else []
    return _framed(records, IMAGE_COLUMNS, wide, above, explained, more)


def _framed(
    records: Sequence[Record],
    columns: Columns,
    wide: bool,
    above: str,
    explained: str,
    more: Sequence[RenderableType],
) -> RenderableType:
    """Render the selected columns, the parts of the time, further tables, and the explanations."""
    selected = [column for column in columns if column[2] or wide]
    headers = ("accelerator", *(header for header, _, _ in selected))
    rows = [(record.accelerator, *(show(record) for _, show, _ in selected)) for record in records]
    parts = [Text(above, style="dim"), figures(headers, rows), _time_table(records, wide), *more]
    parts.append(Text(explained, style="dim"))
    if not wide:
        others = ", ".join(
            header.replace("/\n", "/").replace("\n", " ") for header, _, essential in columns if not essential
        )
        parts.append(Text(f"further columns with --wide: {others}", style="dim"))
    return Group(*parts)


def _time_table(records: Sequence[Record], wide: bool) -> Table:
    """Render the parts of the time, whose shares sum to 100 %."""
    of_drafter = ("weights of\nthe drafter", "its passes\nper round") if wide else ()
    columns = ("accelerator", *of_drafter, "seconds", *records[0].time)
    rows = []
    for record in records:
        count = record.own.get("parameters")
        own = [f"{count / 1e6:.2f} M" if count else "-", f"{record.draft_passes:.1f}"] if wide else []
        shares = map("{:.1%}".format, record.time.values())
        rows.append([record.accelerator, *own, f"{record.seconds:.3f}", *shares])
    return figures(columns, rows, title="parts of the time")


def _category_table(records: Sequence[Record], wide: bool) -> Table:
    columns = ["category", "accelerator", "samples", "identical", "tokens/\npass", "speed-up\n(interval)"]
    rows = []
    for index, record in enumerate(records):
        is_first = not index or record.category != records[index - 1].category
        shown = [str(record.samples), f"{record.identical:.0%}", f"{record.acceptance_length:.2f}"]
        rows.append([record.category if is_first else "", record.accelerator, *shown, speedup(record)])
        if wide:
            rows[-1] += [
                median_prompt(record),
                f"{record.decode_speedup:.2f}x",
                *map("{:.0%}".format, record.time.values()),
            ]
    columns += ["median\nprompt", "decoding\nalone", *records[0].time] if wide else []
    return figures(columns, rows, words=2, title="by category")


def _quality_table(records: Sequence[Record], wide: bool) -> RenderableType:
    """Render the scores of the images; a star marks settings that were not searched."""
    names = list(records[0].quality or {})
    counts = ("rejections\nper image",) if wide else ()
    columns = ("accelerator", *counts, *(name.replace("_", "\n") for name in names))
    rows = [
        (
            record.accelerator + ("" if "searched" in record.own or record.accelerator == BASELINE else " *"),
            *([f"{record.rollbacks / record.samples:.1f}"] if wide else []),
            *(
                "{value:.3g} ({low:.3g} to {high:.3g})".format(**each)
                for each in (record.quality or {}).values()
            ),
        )
        for record in records
    ]
    explained = (
        "kid: kernel distance to images of plain decoding with other seeds; the row of none is the distance "
        "of two samples of one distribution. In brackets 95 % intervals. *: options were not searched."
    )
    return Group(figures(columns, rows, title="scores of the images"), Text(explained, style="dim"))


def _settings(record: Record) -> str:
    """Describe the measurement and the machine in one line."""
    names = ("model", "task", "dtype", "device_name", "torch", "transformers")
    found = dict.fromkeys(names, "") | {"batch_size": "?"} | record.settings
    samples, repeats = (
        f"{count} {name}{'s' if count != 1 else ''}"
        for count, name in ((record.samples, "sample"), (record.repeats, "repeat"))
    )
    return (
        f"{found['model']} | {found['task']}: {samples}, {repeats}, batch size {found['batch_size']} | "
        f"{found['dtype']} on {found['device_name']} | torch {found['torch']}, "
        f"transformers {found['transformers']}"
    )


def peer_table(records: Sequence[Record], missing: Mapping[str, str]) -> RenderableType:
    """Render all records relative to transformers' `generate`, and the reasons for peers that did not run."""
    columns = ("accelerator", "same tokens", "forward\npasses", "tokens/s", "times generate\n(middle half)")
    rows: list[Sequence[str]] = [
        (
            record.accelerator,
            f"{record.identical:.0%}",
            str(record.target_forwards),
            f"{record.tokens_per_second:.0f}",
            "{median:.2f}x ({low:.2f}-{high:.2f})".format(**record.over_generate)
            if record.over_generate
            else "-",
        )
        for record in records
    ]
    rows += [(name, *["-"] * (len(columns) - 1)) for name in missing]
    parts: list[RenderableType] = [figures(columns, rows, title="compared with transformers' generate")]
    parts += [Text(f"{name} did not run: {reason}", style="dim") for name, reason in missing.items()]
    explained = (
        "same tokens: share of outputs with the tokens of none. times generate: seconds of transformers' "
        "plain generate divided by these, on the same prompts in the same repeat; median of all pairs."
    )
    return Group(*parts, Text(explained, style="dim"))
