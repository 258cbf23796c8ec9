"""Files of a bench: comparison of two that --json wrote, and result lines a prompt.

The lines are those that the scripts of Spec-Bench (2401.07851) and MMSpec (2603.14989) read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.timing import TimedRun
from mmspec.text_file import read_text

__all__ = ["Compared", "compare_benches", "read_bench", "result_lines", "write_result_lines"]

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


def write_result_lines(folder: Path, names: Sequence[str], *given: Any) -> list[Path]:
    """Write a file `<accelerator>.jsonl` for each accelerator; the other arguments are of `result_lines`.

    Raises:
        InputError: the folder cannot be written.
    """
    written = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for name in names:
            path = folder / f"{name.replace('/', '_').replace(':', ',')}.jsonl"
            lines = result_lines(name, *given)
            path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
            written.append(path)
    except OSError as error:
        raise InputError(
            "--results", str(folder), f"a folder that can be written ({error.strerror})"
        ) from error
    return written


def result_lines(
    name: str,
    runs: Sequence[TimedRun],
    batches: Sequence[Sequence[Example]],
    decode: Callable[[list[int]], str],
) -> list[dict[str, Any]]:
    """Lines of one accelerator's first repeat, one for each prompt.

    `choices[0]` holds, for all turns together, the text (`turns`), target forwards (`decoding_steps` and
    `idxs`), `new_tokens`, `wall_time` in seconds, and `accept_lengths`: the tokens that each scoring forward
    committed, bonus included, shortest first. Scripts take their mean and sums.

    Args:
        name: of the accelerator.
        runs: of `measure`, with batches of one prompt.
        batches: those that were measured.
        decode: tokens to text.

    Raises:
        InputError: a batch of several prompts, whose times cannot be told apart.
    """
    if any(len(batch) != 1 for batch in batches):
        raise InputError(
            "--batch-size", max(map(len, batches)), "1: result lines have a time for each prompt"
        )
    lines = []
    for run in runs:
        if run.accelerator != name or run.repeat:
            continue
        (example,), stats = batches[run.batch], run.decoded.stats
        lengths = [
            accepted + 1
            for one in stats
            for accepted, count in sorted(one.accepted_histogram.items())
            for _ in range(count)
        ]
        choice = {
            "index": 0,
            "turns": [decode(run.decoded.tokens[0])],
            "decoding_steps": [sum(one.nfe_max for one in stats)],
            "idxs": [sum(one.nfe_max for one in stats)],
            "new_tokens": [sum(sum(one.new_tokens) for one in stats)],
            "wall_time": [run.seconds],
            "accept_lengths": lengths,
        }
        line = {"question_id": example.identifier, "category": example.category, "model_id": name}
        lines.append(line | {"choices": [choice]})
    return lines
