"""Tables of a bench, for people."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from mmspec.call_fields import NO_TRUNCATION
from mmspec.evaluation.speed.record import Record
from mmspec.evaluation.speed.timing import BASELINE
from mmspec.evaluation.tables import figures
from mmspec.open_types import Json

__all__ = ["bench_report", "image_report", "peer_table"]

PARTS_EXPLAINED = (
    "prompt: the target reads the prompts; target: it scores; draft: the drafter; verify: sampler, rule and "
    "commit; rest: loop, canvas and pipeline"
)
WIDE = 150


def speedup(record: Record) -> str:
    """Render the ratio to plain decoding with its interval over prompts, or the extremes of repeats."""
    ends = record.speedup_interval or (record.speedup_min, record.speedup_max)
    return f"{record.speedup:.2f}x ({ends[0]:.2f}-{ends[1]:.2f})"


def median_prompt(record: Record) -> str:
    """Render the ratio to plain decoding of the median prompt."""
    return "-" if record.over_plain is None else f"{record.over_plain['median']:.2f}x"


def _or_dash(value: float | None) -> str:
    return "-" if value is None else f"{value:.3g}"


def _variation(record: Record, which: str) -> str:
    measured = record.tv or record.drift
    return "-" if measured is None else f"{measured[which]:.3f}"


#: Header, what a record shows there, and whether a narrow screen shows it too.
Columns = Sequence[tuple[str, Callable[[Record], str], bool]]

COLUMNS: Columns = (
    ("promise", lambda record: record.exactness, True),
    ("identical", lambda record: f"{record.identical:.0%}", True),
    ("tokens", lambda record: str(record.new_tokens), True),
    ("target\nforwards", lambda record: str(record.target_forwards), True),
    ("tokens/\nforward", lambda record: f"{record.acceptance_length:.2f}", True),
    ("accepted", lambda record: f"{record.acceptance_rate:.0%}", False),
    ("tokens/s", lambda record: f"{record.tokens_per_second:.0f}", False),
    ("speed-up\n(range)", speedup, True),
    ("median\nprompt", median_prompt, False),
    ("decoding\nalone", lambda record: f"{record.decode_speedup:.2f}x", False),
    ("first\ntoken", lambda record: f"{1000 * record.time_to_first_token:.0f} ms", False),
    ("J/token", lambda record: _or_dash(record.joules_per_token), False),
    ("peak\nmemory", lambda record: f"{record.peak_memory_bytes / 1e6:.0f} MB", False),
)
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
        "prompts (the extremes of repeats for fewer than three); median prompt: of the ratios of single "
        "prompts; decoding alone: without reading the prompts. accepted: share of draft tokens. "
        f"memory: {records[0].memory_kind}. Parts of the time: {PARTS_EXPLAINED}."
    )
    more = [_category_table(by_category, width)] if by_category else []
    return _framed(records, COLUMNS, width, _settings(records[0]), explained, more)


def image_report(records: Sequence[Record], *, width: int = WIDE) -> RenderableType:
    """Render the records of images; arguments as of `bench_report`.

    Raises:
        KeyError: a record lacks a setting that its speed-up depends on.
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
        "NFE: target forwards of an image, the prompt's own included, a guided pair being one. "
        "times fewer: NFE of plain decoding over this one. accepted a round: tokens per scoring forward. "
        "tv: measured "
        "total variation to the target at judged places (of vectors: drift, the distance of kept candidates "
        "to the target's own draws), - where none was measured. speed-up: ratio of "
        f"medians over {records[0].repeats} interleaved repeats to {settings['baseline']}; without and "
        "with pixels. same: images with the tokens of plain decoding. state: keys and values. Parts of the "
        f"time, without pixels: {PARTS_EXPLAINED}."
    )
    above = f"{_settings(records[0])} | {', '.join(sampling)}"
    more = [_quality_table(records)] if records[0].quality else []
    return _framed(records, IMAGE_COLUMNS, width, above, explained, more)


def _framed(
    records: Sequence[Record],
    columns: Columns,
    width: int,
    above: str,
    explained: str,
    more: Sequence[RenderableType],
) -> RenderableType:
    """Render the columns that fit the screen, the parts of the time, more tables, and words around them."""
    is_wide = width >= WIDE
    fitting = [column for column in columns if column[2] or is_wide]
    headers = ("accelerator", *(header for header, _, _ in fitting))
    rows = [(record.accelerator, *(show(record) for _, show, _ in fitting)) for record in records]
    table = figures(headers, rows, padding=(0, 1) if is_wide else (0, 0))
    parts = [Text(above, style="dim"), table, _time_table(records, is_wide), *more]
    parts.append(Text(explained, style="dim"))
    if not is_wide:
        left_out = ", ".join(header.replace("\n", " ") for header, _, essential in columns if not essential)
        parts.append(Text(f"left out on a narrow screen: {left_out}", style="dim"))
    return Group(*parts)


def _time_table(records: Sequence[Record], is_wide: bool) -> Table:
    """Render where the time goes: a row for each record, whose parts sum to the whole."""
    of_drafter = ("weights of\nthe drafter", "its passes\na round") if is_wide else ()
    columns = ("accelerator", *of_drafter, "seconds", *records[0].time, "verify\n+ rest")
    rows = []
    for record in records:
        count = record.own.get("parameters")
        own = [f"{count / 1e6:.2f} M" if count else "-", f"{record.draft_passes:.1f}"] if is_wide else []
        shares = [*record.time.values(), record.time["verify"] + record.time["rest"]]
        rows.append([record.accelerator, *own, f"{record.seconds:.3f}", *map("{:.1%}".format, shares)])
    return figures(columns, rows, title="where the time goes")


def _category_table(records: Sequence[Record], width: int) -> Table:
    columns = ["category", "accelerator", "samples", "identical", "tokens/\nforward", "speed-up\n(range)"]
    rows = []
    for index, record in enumerate(records):
        is_first = not index or record.category != records[index - 1].category
        shown = [str(record.samples), f"{record.identical:.0%}", f"{record.acceptance_length:.2f}"]
        rows.append([record.category if is_first else "", record.accelerator, *shown, speedup(record)])
        if width >= WIDE:
            rows[-1] += [
                median_prompt(record),
                f"{record.decode_speedup:.2f}x",
                *map("{:.0%}".format, record.time.values()),
            ]
    columns += ["median\nprompt", "decoding\nalone", *records[0].time] if width >= WIDE else []
    return figures(columns, rows, words=2, title="by category")


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
                "{value:.3g} ({low:.3g} to {high:.3g})".format(**each)
                for each in (record.quality or {}).values()
            ),
        )
        for record in records
    ]
    explained = (
        "kid: kernel distance to images of plain decoding with other seeds; the row of none says how far "
        "apart two samples of one distribution are. In brackets 95 % intervals. *: not searched for."
    )
    return Group(figures(columns, rows, title="what the images show"), Text(explained, style="dim"))


def _settings(record: Record) -> str:
    """Describe the measurement and the machine in a line."""
    told: Json = dict.fromkeys(("model", "task", "dtype", "device_name", "torch", "transformers"), "")
    told |= {"batch_size": "?"} | record.settings
    samples, repeats = (
        f"{count} {name}{'s' if count != 1 else ''}"
        for count, name in ((record.samples, "sample"), (record.repeats, "repeat"))
    )
    return (
        f"{told['model']} | {told['task']}: {samples}, {repeats}, batch size {told['batch_size']} | "
        f"{told['dtype']} on {told['device_name']} | torch {told['torch']}, "
        f"transformers {told['transformers']}"
    )


def peer_table(records: Sequence[Record], missing: Mapping[str, str]) -> RenderableType:
    """Render all rows against transformers' own `generate`, and which ways of it could not run, and why."""
    columns = ("accelerator", "same tokens", "target\nforwards", "tokens/s", "times generate\n(middle half)")
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
    parts: list[RenderableType] = [figures(columns, rows, title="against transformers' generate")]
    parts += [Text(f"{name} did not run: {reason}", style="dim") for name, reason in missing.items()]
    explained = (
        "same tokens: outputs that equal those of none, token for token. times generate: ratio of the "
        "seconds on the same prompts in the same repeat to transformers' plain generate, median of all pairs."
    )
    return Group(*parts, Text(explained, style="dim"))
