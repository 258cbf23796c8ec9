"""Bench table of images, which prints a speed-up only beside the settings that it depends on."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import RenderableType

from mmspec.errors import InputError
from mmspec.evaluation.speed.record import BenchRecord
from mmspec.evaluation.speed.report import (
    PARTS_EXPLAINED,
    WIDE,
    Columns,
    describe_settings,
    framed_table,
    speedup,
    time_table,
)

__all__ = ["REQUIRED", "check_context", "image_report"]

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


def check_context(record: BenchRecord) -> None:
    """Check that a record has all the settings that its speed-up depends on.

    Raises:
        InputError: a setting is missing, no forwards were counted, or the promise is none.
    """
    own = OF_VECTORS if "num_inference_steps" in record.settings else OF_TOKENS
    missing = [name for name in REQUIRED + own if name not in record.settings]
    if missing:
        raise InputError("record", record.accelerator, f"a speed-up needs beside it: {', '.join(missing)}")
    if record.nfe_mean <= 0:
        raise InputError("record", record.accelerator, "a speed-up needs the number of target forwards")
    promise = record.settings["promise"]
    if promise not in ("exact", "approximate") and not str(promise).startswith(("tv<=", "lossy, ")):
        allowed = "'exact', 'tv<=x', 'approximate', or 'lossy, ' with its bound or 'no bound'"
        raise InputError("promise", promise, allowed)


#: Header, what a record shows there, and whether a narrow screen shows it too.
COLUMNS: Columns = (
    ("promise", lambda record: str(record.settings["promise"]), True),
    ("window", lambda record: str(record.settings["window"]), False),
    ("same", lambda record: f"{record.identical:.0%}", False),
    ("NFE\nmean", lambda record: f"{record.nfe_mean:.1f}", True),
    ("NFE\nmax", lambda record: str(record.nfe_max), True),
    ("tokens/\nforward", lambda record: f"{record.step_compression:.2f}", True),
    ("accepted\na round", lambda record: f"{record.acceptance_length:.2f}", False),
    ("tv or\ndrift", lambda record: _variation(record, "mean"), True),
    ("its\nmax", lambda record: _variation(record, "max"), False),
    ("speed-up\n(range)", speedup, True),
    ("with\npixels", lambda record: f"{record.speedup_with_pixels:.2f}x", True),
    ("state", lambda record: f"{record.state_bytes / 1e6:.1f} MB", False),
)


def image_report(records: Sequence[BenchRecord], *, width: int = WIDE) -> RenderableType:
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
        "tokens/forward: all tokens over NFE. accepted a round: tokens per scoring forward. tv: measured "
        "total variation to the target at judged places (of vectors: drift, the distance of kept candidates "
        "to the target's own draws), - where none was measured. speed-up: ratio of "
        f"medians over {records[0].repeats} interleaved repeats to {settings['baseline']}; without and "
        "with pixels. same: images with the tokens of plain decoding. state: keys and values. Parts of the "
        f"time, without pixels: {PARTS_EXPLAINED}."
    )
    above = f"{describe_settings(settings, records[0])} | {warpers}"
    return framed_table(above, records, COLUMNS, width, explained, [time_table(records)])


def _variation(record: BenchRecord, which: str) -> str:
    measured = record.tv or record.drift
    return "-" if measured is None else f"{measured[which]:.3f}"
