"""Tables of a bench, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmspec.errors import InputError
from mmspec.evaluation.speed.record import Record
from mmspec.evaluation.speed.timing import BASELINE
from mmspec.evaluation.tables import figures

__all__ = [
    "REQUIRED",
    "bench_report",
    "check_context",
    "image_report",
    "peer_table",
]

PARTS_EXPLAINED = (
    "prompt: the target reads the prompts; target: it scores; draft: the drafter; verify: sampler, rule and "
    "commit; rest: loop, canvas and pipeline"
)
WIDE = 150


def speedup(record: Record) -> str:
    """Render the ratio to plain decoding with its interval over prompts, or the extremes of repeats."""
    ends = record.speedup_interval or (record.speedup_min, record.speedup_max)
    return f"{record.speedup:.2f}x ({ends[0]:.2f}-{ends[1]:.2f})"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _millions(count: int | None) -> str:
    return f"{count / 1e6:.2f} M" if count else "-"


Columns = Sequence[tuple[str, Callable[[Record], str], bool]]

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
    records: Sequence[Record], by_category: Sequence[Record] = (), *, width: int = WIDE
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
    more = [time_table(records, width), *([_category_table(by_category, width)] if by_category else [])]
    above = describe_settings(records[0].settings, records[0])
    return framed_table(above, records, COLUMNS, width, explained, more)


def framed_table(
    above: str,
    records: Sequence[Record],
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


def bench_table(records: Sequence[Record], columns: Columns, width: int) -> Table:
    """Render the columns that fit the screen, a row for each record."""
    columns = [column for column in columns if column[2] or width >= WIDE]
    headers = ("accelerator", *(header for header, _, _ in columns))
    rows = [(record.accelerator, *(show(record) for _, show, _ in columns)) for record in records]
    return figures(headers, rows, padding=(0, 1) if width >= WIDE else (0, 0))


def time_table(records: Sequence[Record], width: int) -> Table:
    """Render where the time goes: a row for each record, whose parts sum to the whole."""
    of_drafter = ("weights of\nthe drafter", "its passes\na round") if width >= WIDE else ()
    columns = ("accelerator", *of_drafter, "seconds", *records[0].time, "verify\n+ rest")
    rows = []
    for record in records:
        drafter = [_millions(record.own.get("parameters")), f"{record.draft_passes:.1f}"]
        shares = [*record.time.values(), record.time["verify"] + record.time["rest"]]
        own = drafter if of_drafter else []
        rows.append(
            (record.accelerator, *own, f"{record.seconds:.3f}", *(f"{share:.1%}" for share in shares))
        )
    return figures(columns, rows, title="where the time goes")


def peer_table(records: Sequence[Record], missing: Mapping[str, str]) -> RenderableType:
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


def _category_table(records: Sequence[Record], width: int) -> Table:
    columns = ["category", "accelerator", "samples", "identical", "tokens/\nforward", "speed-up\n(range)"]
    if width >= WIDE:
        columns += ["decoding\nalone", *records[0].time]
    rows = []
    for index, record in enumerate(records):
        is_first = not index or record.category != records[index - 1].category
        figures_of = [str(record.samples), f"{record.identical:.0%}", f"{record.acceptance_length:.2f}"]
        row = [record.category if is_first else "", record.accelerator, *figures_of, speedup(record)]
        if width >= WIDE:
            row += [f"{record.decode_speedup:.2f}x", *(f"{part:.0%}" for part in record.time.values())]
        rows.append(row)
    return figures(columns, rows, words=2, title="by category")


def describe_settings(settings: dict[str, Any], record: Record) -> str:
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


#: A speed-up means nothing without these, since every one of them changes it.
REQUIRED = (
    "dtype",
    "batch_size",
    "window",
    "guidance_scale",
    "temperature",
    "baseline",
    "promise",
)
OF_TOKENS, OF_VECTORS = ("top_k", "top_p", "min_p"), ("num_inference_steps", "guidance_schedule")


def check_context(record: Record) -> None:
    """Check that a record has all the settings that its speed-up depends on.

    Raises:
        InputError: a setting is missing, no forwards were counted, or the promise is none.
    """
    settings = {**record.settings, **record.own}
    own = OF_VECTORS if "num_inference_steps" in settings else OF_TOKENS
    missing = [name for name in REQUIRED + own if name not in settings]
    if missing:
        raise InputError("record", record.accelerator, f"a speed-up needs beside it: {', '.join(missing)}")
    if record.nfe_mean <= 0:
        raise InputError("record", record.accelerator, "a speed-up needs the number of target forwards")
    promise = settings["promise"]
    if promise not in ("exact", "approximate") and not str(promise).startswith(("tv<=", "lossy, ")):
        allowed = "'exact', 'tv<=x', 'approximate', or 'lossy, ' with its bound or 'no bound'"
        raise InputError("promise", promise, allowed)


#: Header, what a record shows there, and whether a narrow screen shows it too.
IMAGE_COLUMNS: Columns = (
    ("promise", lambda record: str(record.own["promise"]), True),
    ("window", lambda record: str(record.own["window"]), False),
    ("same", lambda record: f"{record.identical:.0%}", False),
    ("NFE\nmean", lambda record: f"{record.nfe_mean:.1f}", True),
    ("NFE\nmax", lambda record: str(record.nfe_max), True),
    ("times\nfewer", lambda record: f"{record.step_compression:.2f}x", True),
    ("accepted\na round", lambda record: f"{record.acceptance_length:.2f}", False),
    ("tv or\ndrift", lambda record: _variation(record, "mean"), True),
    ("its\nmax", lambda record: _variation(record, "max"), False),
    ("speed-up\n(range)", speedup, True),
    ("with\npixels", lambda record: f"{record.speedup_with_pixels:.2f}x", True),
    ("state", lambda record: f"{record.state_bytes / 1e6:.1f} MB", False),
)


def image_report(records: Sequence[Record], *, width: int = WIDE) -> RenderableType:
    """Render the records as a table, with the settings above and an explanation below.

    Args:
        records: of all prompts.
        width: characters on a line; below 150 some columns are left out, and named.

    Raises:
        InputError: a record lacks a setting that its speed-up depends on.
    """
    for record in records:
        check_context(record)
    settings = records[0].settings
    off = {"top_k": (None, 0), "top_p": (None, 1.0), "min_p": (None, 0.0)}
    cuts = [
        f"{name.replace('_', '-')} {'off' if settings[name] in values else settings[name]}"
        for name, values in off.items()
        if name in settings
    ]
    if "num_inference_steps" in settings:
        guided = f"guidance {settings['guidance_schedule']}"
        cuts += [f"{settings['num_inference_steps']} steps of the head", guided]
    warpers = ", ".join(
        [f"guidance {settings['guidance_scale']:g}", f"temperature {settings['temperature']:g}", *cuts]
    )
    explained = (
        "NFE: target forwards of an image, the prompt's own included, a guided pair being one. "
        "times fewer: NFE of plain decoding over this one. accepted a round: tokens per scoring forward. "
        "tv: measured "
        "total variation to the target at judged places (of vectors: drift, the distance of kept candidates "
        "to the target's own draws), - where none was measured. speed-up: ratio of "
        f"medians over {records[0].repeats} interleaved repeats to {settings['baseline']}; without and "
        "with pixels. same: images with the tokens of plain decoding. state: keys and values. Parts of the "
        f"time, without pixels: {PARTS_EXPLAINED}."
    )
    above = f"{describe_settings(settings, records[0])} | {warpers}"
    more = [time_table(records, width), *([_quality_table(records)] if records[0].quality else [])]
    return framed_table(above, records, IMAGE_COLUMNS, width, explained, more)


def _quality_table(records: Sequence[Record]) -> RenderableType:
    """Render what the images show; a star marks settings that were not searched for."""
    names = list(records[0].quality or {})
    columns = ("accelerator", "overlap", "refusals\nan image", *(name.replace("_", "\n") for name in names))
    rows = [
        (
            record.accelerator + ("" if "searched" in record.own or record.accelerator == BASELINE else " *"),
            _or_dash(record.overlap),
            f"{record.rollbacks / record.samples:.1f}",
            *(
                "{value:.3g} ({low:.3g} to {high:.3g})".format(**record.quality[name])
                for name in names
                if record.quality
            ),
        )
        for record in records
    ]
    explained = (
        "kid: kernel distance to images of plain decoding with other seeds; the row of none says how far "
        "apart two samples of one distribution are. In brackets 95 % intervals. *: not searched for."
    )
    return Group(figures(columns, rows, title="what the images show"), Text(explained, style="dim"))


def _variation(record: Record, which: str) -> str:
    measured = record.tv or record.drift
    return "-" if measured is None else f"{measured[which]:.3f}"
