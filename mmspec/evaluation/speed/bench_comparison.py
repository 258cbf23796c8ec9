"""Comparison of two benches that were written with --json."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmspec.errors import InputError
from mmspec.text_file import read_text

__all__ = ["Compared", "compare_benches", "read_bench"]

SAME = ("model", "task", "batch_size", "dtype", "max_new_tokens", "temperature", "guidance_scale", "samples")
TOLD = ("device", "torch", "transformers", "triton", "mmspec")
MAX_BYTES = 100_000_000


@dataclass(frozen=True)
class Compared:
    """One accelerator in two benches.

    Attributes:
        before, after: its speed-ups over plain decoding in each, which do not depend on the machine's speed.
        before_interval, after_interval: their 95 % intervals; None where a bench had too few prompts.
        ratio: after / before.
        seconds_ratio: seconds before / seconds after, of two runs on one machine.
        differs: whether the intervals lie apart; None without them.
        same_figures: whether forwards and tokens are equal, as those of equal code are.
    """

    accelerator: str
    before: float
    after: float
    before_interval: tuple[float, float] | None
    after_interval: tuple[float, float] | None
    ratio: float
    seconds_ratio: float
    differs: bool | None
    same_figures: bool

    def as_dict(self) -> dict[str, Any]:
        """The figures by name."""
        return asdict(self)


def read_bench(path: Path) -> tuple[dict[str, Any], dict[str, dict[str, Any]]]:
    """Settings of a bench, and its records of all prompts by accelerator.

    Raises:
        InputError: no file of `mmspec bench --json`.
    """
    allowed = "a file written by `mmspec bench --json`"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("too large")
        bench = json.loads(read_text(path, "bench", allowed))
        settings = dict(bench["settings"])
        found = {str(one["accelerator"]): one for one in bench["records"] if not one.get("category")}
        for one in found.values():
            if not all(float(one[name]) > 0 for name in ("speedup", "seconds")):
                raise ValueError("speedup and seconds are numbers above 0")
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("bench", str(path), f"{allowed} ({type(error).__name__}: {error})") from error
    if not found:
        raise InputError("bench", str(path), f"{allowed}; it has no record")
    return {**settings, "samples": next(iter(found.values())).get("samples")}, found


def compare_benches(before: Path, after: Path) -> tuple[list[Compared], list[str]]:
    """Compare the accelerators that two benches share.

    Returns:
        One record for each, in the order of the second; and what else differs, in words.

    Raises:
        InputError: a file that cannot be used, other prompts or settings, or no accelerator in both.
    """
    (old_settings, old), (new_settings, new) = read_bench(before), read_bench(after)
    shared = [name for name in new if name in old]
    if not shared:
        raise InputError("bench", f"{list(old)} and {list(new)}", "benches with an accelerator in common")
    for name in SAME:
        ours, theirs = new_settings.get(name), old_settings.get(name)
        if ours != theirs:
            raise InputError(name, f"{theirs!r} and {ours!r}", "benches of the same prompts and settings")
    told = []
    for name in TOLD:
        theirs, ours = old_settings.get(name), new_settings.get(name)
        if ours != theirs:
            told.append(f"{name}: {theirs} and {ours}")
    told += [
        f"only in {path}: {name}"
        for path, one, other in ((before, old, new), (after, new, old))
        for name in one
        if name not in other
    ]
    return [_compare(name, old[name], new[name]) for name in shared], told


def _compare(name: str, old: dict[str, Any], new: dict[str, Any]) -> Compared:
    first, second = (
        tuple(one["speedup_interval"]) if one.get("speedup_interval") else None for one in (old, new)
    )
    apart = None
    if first is not None and second is not None:
        apart = first[1] < second[0] or second[1] < first[0]
    counted = ("new_tokens", "target_forwards", "acceptance_rate", "identical")
    return Compared(
        accelerator=name,
        before=float(old["speedup"]),
        after=float(new["speedup"]),
        before_interval=first,
        after_interval=second,
        ratio=float(new["speedup"]) / float(old["speedup"]),
        seconds_ratio=float(old["seconds"]) / float(new["seconds"]),
        differs=apart,
        same_figures=all(old.get(key) == new.get(key) for key in counted),
    )
