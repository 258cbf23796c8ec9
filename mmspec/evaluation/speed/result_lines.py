"""Results a prompt a line, as the scripts of Spec-Bench (2401.07851) and MMSpec (2603.14989) read them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import InputError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.timing import TimedRun

__all__ = ["result_lines", "write_result_lines"]


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
