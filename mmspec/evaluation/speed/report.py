"""Tables of a bench, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmspec.evaluation.speed.record import BenchRecord
from mmspec.evaluation.tables import figures

__all__ = [
    "PARTS_EXPLAINED",
    "WIDE",
    "Columns",
    "bench_report",
    "bench_table",
    "describe_settings",
    "framed_table",
    "peer_table",
    "speedup",
    "time_table",
]

PARTS_EXPLAINED = (
    "prompt: the target reads the prompts; target: it scores; draft: the drafter; verify: sampler, rule and "
    "commit; rest: loop, canvas and pipeline"
)
WIDE = 150


def speedup(record: BenchRecord) -> str:
    """Render the ratio to plain decoding with its interval over prompts, or the extremes of repeats."""
    ends = record.speedup_interval or (record.speedup_min, record.speedup_max)
    return f"{record.speedup:.2f}x ({ends[0]:.2f}-{ends[1]:.2f})"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


Columns = Sequence[tuple[str, Callable[[BenchRecord], str], bool]]

#: Of the bench table: header, what a record shows there, and whether a narrow screen shows it too.
COLUMNS: Columns = (
    ("promise", lambda record: record.exactness, True),
    ("identical", lambda record: f"{record.identical:.0%}", True),
    ("tokens", lambda record: str(record.new_tokens), True),
    ("target\nforwards", lambda record: str(record.target_forwards), True),
    ("tokens/\nforward", lambda record: f"{record.acceptance_length:.2f}", True),
    ("accepted", lambda record: f"{record.acceptance_rate:.0%}", False),
    ("tokens/s", lambda record: f"{record.tokens_per_second:.0f}", False),
    ("speed-up\n(range)", speedup, True),
    ("decoding\nalone", lambda record: f"{record.decode_speedup:.2f}x", False),
    ("first\ntoken", lambda record: f"{1000 * record.time_to_first_token:.0f} ms", False),
    ("J/token", lambda record: _or_dash(record.joules_per_token), False),
    ("peak\nmemory", lambda record: f"{record.peak_memory_bytes / 1e6:.0f} MB", False),
)


def bench_report(
    records: Sequence[BenchRecord], by_category: Sequence[BenchRecord] = (), *, width: int = WIDE
) -> RenderableType:
    """Render the records as a table, with the settings above and an explanation below.

    Args:
        records: of all prompts.
        by_category: of the prompts of each category.
        width: characters on a line; below 150 some columns are left out, and named.
    """
    explained = (
        "tokens/forward counts the bonus token, plain decoding has 1. speed-up: ratio to none in this run, "
        f"of medians over {records[0].repeats} interleaved repeats, and its 95 % bootstrap interval over "
        "prompts (the extremes of repeats for fewer than three); decoding alone: without reading the "
        "prompts. accepted: share of draft tokens. "
        f"memory: {records[0].memory_kind}. Parts of the time: {PARTS_EXPLAINED}."
    )
    more = [time_table(records), *([_category_table(by_category)] if by_category else [])]
    above = describe_settings(records[0].settings, records[0])
    return framed_table(above, records, COLUMNS, width, explained, more)


def framed_table(
    above: str,
    records: Sequence[BenchRecord],
    columns: Columns,
    width: int,
    explained: str,
    more: Sequence[RenderableType] = (),
) -> RenderableType:
    """Render a table with a line above it, more tables and an explanation below, and what was left out."""
    parts = [Text(above, style="dim"), bench_table(records, columns, width), *more]
    parts.append(Text(explained, style="dim"))
    if width < WIDE:
        left_out = ", ".join(header.replace("\n", " ") for header, _, essential in columns if not essential)
        parts.append(Text(f"left out on a narrow screen: {left_out}", style="dim"))
    return Group(*parts)


def bench_table(records: Sequence[BenchRecord], columns: Columns, width: int) -> Table:
    """Render the columns that fit the screen, a row for each record."""
    columns = [column for column in columns if column[2] or width >= WIDE]
    headers = ("accelerator", *(header for header, _, _ in columns))
    rows = [(record.accelerator, *(show(record) for _, show, _ in columns)) for record in records]
    return figures(headers, rows, padding=(0, 1) if width >= WIDE else (0, 0))


def time_table(records: Sequence[BenchRecord]) -> Table:
    """Render where the time goes: a row for each record, whose parts sum to the whole."""
    columns = ("accelerator", "seconds", *records[0].shares, "verify\n+ rest")
    rows = [
        (
            record.accelerator,
            f"{record.seconds:.3f}",
            *(f"{share:.1%}" for share in record.shares.values()),
            f"{record.verify_share + record.rest_share:.1%}",
        )
        for record in records
    ]
    return figures(columns, rows, title="where the time goes")


def peer_table(records: Sequence[BenchRecord], missing: Mapping[str, str]) -> RenderableType:
    """Render all rows against transformers' own `generate`, and which ways of it could not run, and why.

    Args:
        records: of one run, those of `generate` among them.
        missing: name -> reason.
    """
    columns = ("accelerator", "same tokens", "target\nforwards", "tokens/s", "times generate\n(middle half)")
    rows: list[Sequence[str]] = [
        (
            record.accelerator,
            f"{record.identical:.0%}",
            str(record.target_forwards),
            f"{record.tokens_per_second:.0f}",
            "-"
            if record.over_generate is None
            else "{median:.2f}x ({low:.2f}-{high:.2f})".format(**record.over_generate),
        )
        for record in records
    ]
    rows += [(name, *["-"] * (len(columns) - 1)) for name in missing]
    parts: list[RenderableType] = [figures(columns, rows, title="against transformers' generate")]
    parts += [Text(f"{name} did not run: {reason}", style="dim") for name, reason in missing.items()]
    explained = (
        "same tokens: outputs that equal those of none, token for token. times generate: ratio of the "
        "seconds on the same prompts in the same repeat to transformers' plain generate, median of all pairs."
    )
    return Group(*parts, Text(explained, style="dim"))


def _category_table(records: Sequence[BenchRecord]) -> Table:
    columns = ("category", "accelerator", "samples", "identical", "tokens/\nforward", "speed-up\n(range)")
    rows = [
        (
            "" if index and record.category == records[index - 1].category else record.category,
            record.accelerator,
            str(record.samples),
            f"{record.identical:.0%}",
            f"{record.acceptance_length:.2f}",
            speedup(record),
        )
        for index, record in enumerate(records)
    ]
    return figures(columns, rows, words=2, title="by category")


def describe_settings(settings: dict[str, Any], record: BenchRecord) -> str:
    """Describe the measurement and the machine in a line."""
    samples = f"{record.samples} sample{'s' if record.samples != 1 else ''}"
    repeats = f"{record.repeats} repeat{'s' if record.repeats != 1 else ''}"
    shown = [
        str(settings.get("model", "")),
        f"{settings.get('task', '')}: {samples}, {repeats}, batch size {settings.get('batch_size', '?')}",
        f"{settings.get('dtype', '')} on {settings.get('device_name', '')}",
        f"torch {settings.get('torch', '')}, transformers {settings.get('transformers', '')}",
    ]
    return " | ".join(shown)
