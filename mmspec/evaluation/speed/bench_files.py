"""Files of a bench: comparison of two JSON results, and result lines for each prompt.

The lines have the format of the scripts of Spec-Bench (2401.07851) and MMSpec (2603.14989).
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.timing import TimedRun
from mmspec.open_types import Json
from mmspec.text_file import read_text

__all__ = ["Compared", "compare_benches", "result_lines", "write_result_lines"]

SAME = ("model", "task", "batch_size", "dtype", "max_new_tokens", "temperature", "guidance_scale", "samples")
REPORTED = ("device", "torch", "transformers", "triton", "mmspec")
MAX_BYTES = 100_000_000

Figures = Json
"""A record, or the settings of a bench, in JSON form."""


@dataclass(frozen=True)
class Compared:
    """One accelerator in two benches.

    Attributes:
        before, after: speed-ups in each bench, which do not depend on the machine's speed.
        before_interval, after_interval: their 95 % intervals; None if a bench had too few prompts.
        ratio: after / before.
        seconds_ratio: seconds before / seconds after; meaningful for two runs on one machine.
        differs: whether the intervals are disjoint; None without intervals.
        same_figures: whether forward passes and tokens are equal, as they are for equal code.
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


def read_bench(path: Path) -> tuple[Figures, dict[str, Figures]]:
    """Read the settings of a bench, and its records of all prompts by accelerator.

    Raises:
        InputError: the file is not from `mmspec bench --json`.
    """
    rule = "must be a file written by `mmspec bench --json`"
    try:
        if path.stat().st_size > MAX_BYTES:
            raise ValueError("too large")
        bench = json.loads(read_text(path, "bench", rule))
        found = {str(one["accelerator"]): one for one in bench["records"] if not one.get("category")}
        for one in found.values():
            if not all(float(one[name]) > 0 for name in ("speedup", "seconds")):
                raise ValueError("speedup and seconds are numbers above 0")
        settings = dict(bench["settings"])
    except InputError:
        raise
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise InputError("bench", str(path), f"{rule} ({type(error).__name__}: {error})") from error
    if not found:
        raise InputError("bench", str(path), "has no records; run the bench again")
    return {**settings, "samples": next(iter(found.values())).get("samples")}, found


def compare_benches(before: Path, after: Path) -> tuple[list[Compared], list[str]]:
    """Compare the accelerators that two benches share.

    Returns:
        One record per accelerator, in the order of the second bench; and descriptions of other differences.

    Raises:
        InputError: a file is invalid, prompts or settings differ, or no accelerator is in both.
    """
    (old_settings, old), (new_settings, new) = read_bench(before), read_bench(after)
    shared = [name for name in new if name in old]
    if not shared:
        raise InputError(
            "bench", f"{list(old)} and {list(new)}", "must have at least one accelerator in common"
        )
    remarks = []
    for name in (*SAME, *REPORTED):
        theirs, ours = old_settings.get(name), new_settings.get(name)
        if ours != theirs and name in SAME:
            raise InputError(name, f"{theirs!r} and {ours!r}", "must be the same in both benches")
        if ours != theirs:
            remarks.append(f"{name}: {theirs} and {ours}")
    remarks += [f"only in {before}: {name}" for name in old if name not in new]
    remarks += [f"only in {after}: {name}" for name in new if name not in old]
    return [_compare(name, old[name], new[name]) for name in shared], remarks


def _compare(name: str, old: Figures, new: Figures) -> Compared:
    first, second = (one.get("speedup_interval") and tuple(one["speedup_interval"]) for one in (old, new))
    counted = ("new_tokens", "target_forwards", "acceptance_rate", "identical")
    return Compared(
        accelerator=name,
        before=float(old["speedup"]),
        after=float(new["speedup"]),
        before_interval=first,
        after_interval=second,
        ratio=float(new["speedup"]) / float(old["speedup"]),
        seconds_ratio=float(old["seconds"]) / float(new["seconds"]),
        differs=(first[1] < second[0] or second[1] < first[0]) if first and second else None,
        same_figures=all(old.get(key) == new.get(key) for key in counted),
    )


def write_result_lines(
    folder: Path,
    names: Sequence[str],
    runs: Sequence[TimedRun],
    batches: Sequence[Sequence[Example]],
    decode: Callable[[list[int]], str],
) -> None:
    """Write the `result_lines` of each accelerator to `<accelerator>.jsonl` in a folder.

    Raises:
        InputError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            lines = result_lines(name, runs, batches, decode)
            path = folder / f"{name.replace('/', '_').replace(':', ',')}.jsonl"
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    except OSError as error:
        raise InputError("--results", str(folder), f"cannot be written ({error.strerror})") from error


def result_lines(
    name: str,
    runs: Sequence[TimedRun],
    batches: Sequence[Sequence[Example]],
    decode: Callable[[list[int]], str],
) -> list[Json]:
    """Result lines of one accelerator's first repeat, one per prompt; `decode` converts tokens to text.

    `choices[0]` contains, for all turns together, the text (`turns`), forward passes of the target
    (`decoding_steps` and `idxs`), `new_tokens`, `wall_time` in seconds, and `accept_lengths`: the tokens that
    each scoring forward pass committed, bonus token included, in ascending order. The benchmarks' scripts
    use only their mean and sums.

    Raises:
        InputError: a batch has several prompts, whose times cannot be separated.
    """
    if (largest := max(map(len, batches))) != 1:
        raise InputError("--batch-size", largest, "must be 1 for result lines, which have a time per prompt")
    lines = []
    for run in runs:
        if run.accelerator != name or run.repeat:
            continue
        (example,), stats = batches[run.batch], run.decoded.stats
        histograms = [sorted(one.accepted_histogram.items()) for one in stats]
        forwards = sum(one.nfe_max for one in stats)
        choice = {
            "index": 0,
            "turns": [decode(run.decoded.tokens[0])],
            "decoding_steps": [forwards],
            "idxs": [forwards],
            "new_tokens": [sum(sum(one.new_tokens) for one in stats)],
            "wall_time": [run.seconds],
            "accept_lengths": [length + 1 for one in histograms for length, n in one for _ in range(n)],
        }
        line = {"question_id": example.identifier, "category": example.category, "model_id": name}
        lines.append(line | {"choices": [choice]})
    return lines
