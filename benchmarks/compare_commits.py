"""Compare two commits of this repository on one machine: the tokens of every accelerator, and their speed.

    python benchmarks/compare_commits.py BEFORE AFTER                 # token ids, for fixed seeds
    python benchmarks/compare_commits.py BEFORE AFTER --repeats 5     # and paired times of 20 prompts

Each commit is unpacked to a folder and runs in a separate process, through its public names only. Both
commits read the same model folders. Calls alternate between the two processes, so that changes of the
machine's speed affect both. The exit code is 1 if any token differs, or if the median time ratio of an
accelerator is too low.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Annotated, Any

import typer
from PIL import Image
from tqdm import tqdm

from mmspec.registry import parse_options
from mmspec.scenes import IMAGE_TOKENS, caption, render, sample_scene

ROOT = Path(__file__).resolve().parents[1]
ASSETS = ROOT / "assets"
FIRST_SCENE = 20_000
#: For each model, its accelerators with default settings. `OTHERS` adds settings whose ids are compared too.
DEFAULTS = {
    "scenes-llava": [
        "none",
        "copy",
        f"draft_model:drafter={ASSETS}/scenes-llava-small",
        *(f"{n}:drafter={ASSETS}/scenes-llava-{n}" for n in ("eagle", "flash")),
    ],
    "scenes-llamagen": [
        *("none", "sjd", "gsd", "lantern", "zipar"),
        f"eagle:drafter={ASSETS}/scenes-llamagen-eagle",
        f"cjd:drafter={ASSETS}/scenes-llamagen-cjd",
    ],
    "scenes-hybrid": ["none", "copy", f"dflash:drafter={ASSETS}/scenes-hybrid-dflash"],
    "scenes-nextstep": [
        *("none", "shared_noise", "shared_noise:tolerance=0"),
        f"draft_model:drafter={ASSETS}/scenes-nextstep-draft",
    ],
    "scenes-mar": ["masked", f"cspd:drafter={ASSETS}/scenes-mar-half"],
}
OTHERS = {
    "scenes-llava": [
        "copy:acceptance=typical:epsilon=0.3:delta=0.09",
        f"draft_model:drafter={ASSETS}/scenes-llava-small:sampling=sampled:acceptance=speculative_sampling",
        f"draft_model:drafter={ASSETS}/scenes-llava-small:length=confidence",
        f"eagle:drafter={ASSETS}/scenes-llava-eagle:tree=medusa",
        f"flash:drafter={ASSETS}/scenes-llava-flash:block=1",
    ],
    "scenes-llamagen": [
        *("sjd:coupling=exact", "sjd:coupling=gumbel", "sjd:coupling=fresh:init=repeat"),
        *("sjd:front=4x2:reach=3", "sjd:coupling=exact:front=4x2:reach=3"),
        *("sjd:acceptance=lantern", "sjd:acceptance=lantern++", "sjd:acceptance=grouped"),
        *("sjd:acceptance=suffix", "gsd:relaxation=omega", "zipar:adaptive=true"),
        f"eagle:drafter={ASSETS}/scenes-llamagen-eagle:acceptance=budget:relaxation=groups",
        f"cjd:drafter={ASSETS}/scenes-llamagen-cjd:coupling=exact",
    ],
    "scenes-hybrid": [f"dflash:drafter={ASSETS}/scenes-hybrid-dspark"],
    "scenes-mar": ["masked:iterations=20:order=checkerboard", "masked:last_steps=10"],
}

VECTORS = {"num_inference_steps": 10, "last_step_noise": True}  # for models of continuous tokens

WORKER = """
import json, sys, time
import torch
from PIL import Image
from transformers.utils import logging
logging.disable_progress_bar()
torch.set_num_threads(1)
from mmspec import MMSpecPipeline
pipe = MMSpecPipeline.from_pretrained(sys.argv[1], dtype=torch.float32)
draws, kept = hasattr(pipe, "set_progress_bar_config"), {}
if draws:
    pipe.set_progress_bar_config(disable=True)
for line in sys.stdin:
    task = json.loads(line)
    if task["label"] not in kept:
        pipe.set_accelerator(task["name"], **task["options"])
        kept[task["label"]] = pipe.accelerator, pipe.draft_processor
    pipe.accelerator, pipe.draft_processor = kept[task["label"]]
    inputs = {"output_type": "latent"} if draws else {"images": [[Image.open(f)] for f in task["images"]]}
    if task["prompts"]:
        inputs["prompt"] = task["prompts"]
    started = time.process_time()  # one thread: what it would take on a machine that has nothing else to do
    output = pipe(**inputs, **task["settings"])
    seconds = time.process_time() - started
    # vectors are compared by their bytes
    tokens = [[v if isinstance(v, int) else v.numpy().tobytes().hex() for v in row] for row in output.tokens]
    print(json.dumps({"tokens": tokens, "seconds": seconds}), flush=True)
"""


@dataclass(frozen=True)
class Task:
    """One call of a pipeline.

    Attributes:
        label: the accelerator, as the command line takes it.
        settings: of the call, such as the temperature.
    """

    label: str
    prompts: Sequence[str]
    images: Sequence[str]
    settings: dict[str, Any] = field(default_factory=dict)

    def as_json(self) -> str:
        name, options = parse_options("accelerator", self.label)
        return json.dumps(vars(self) | {"name": name, "options": options})


class Worker:
    """The process of a commit, with one model loaded."""

    def __init__(self, code: Path, model: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", WORKER, str(model)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            cwd=code,
            env=os.environ | {"PYTHONPATH": str(code), "HF_HUB_OFFLINE": "1"},
        )

    def run(self, task: Task) -> dict[str, Any]:
        """Run a task, and return its `tokens` and `seconds`.

        Raises:
            RuntimeError: the process ended with an error, which it printed to stderr.
        """
        if self.process.stdin is None or self.process.stdout is None:
            raise RuntimeError("the process has no pipes")
        self.process.stdin.write(task.as_json() + "\n")
        self.process.stdin.flush()
        if not (line := self.process.stdout.readline()):
            raise RuntimeError(f"a commit failed at {task.label}; its error is above")
        result: dict[str, Any] = json.loads(line)
        return result


def unpack(commit: str, folder: Path) -> Path:
    """Unpack the code of a commit, without its assets, and return the folder."""
    folder.mkdir()
    command = ["git", "archive", commit, "mmspec", "pipelines", "kernels"]
    archive = subprocess.run(command, cwd=ROOT, check=True, capture_output=True)
    subprocess.run(["tar", "x", "-C", str(folder)], input=archive.stdout, check=True)
    return folder


def list_tasks(
    model: str, labels: Sequence[str], batches: Sequence[Sequence[int]], folder: Path
) -> list[Task]:
    """Make tasks for each accelerator and batch of scenes, and write images of the prompts to the folder."""
    tasks = []
    for label in labels:
        for batch in batches:
            if model == "scenes-mar":
                labels = {"class_labels": [one % 48 for one in batch]}
                tasks.append(Task(label, [], [], {"seed": 7, **VECTORS, **labels}))
                continue
            if model in ("scenes-llamagen", "scenes-nextstep"):
                captions = [caption(sample_scene(FIRST_SCENE + one, profile=IMAGE_TOKENS)) for one in batch]
                steps = VECTORS if model == "scenes-nextstep" else {}
                tasks.append(Task(label, captions, [], {"seed": 7, **steps}))
                continue
            files = [str(folder / f"{one}.png") for one in batch]
            for one, file in zip(batch, files, strict=True):
                Image.fromarray(render(sample_scene(FIRST_SCENE + one))).save(file)
            common = {"max_new_tokens": 128, "seed": 7}
            prompts = ["Describe the picture."] * len(batch)  # words of the model's vocabulary
            tasks += [
                Task(label, prompts, files, common | {"temperature": temperature})
                for temperature in ((0.0, 1.0) if len(batch) > 1 else (0.0,))
            ]
    return tasks


def compare_ids(workers: Sequence[Worker], model: str, tasks: Sequence[Task]) -> bool:
    """Print the accelerators whose token ids differ, and return whether all are equal."""
    different, tokens = [], 0
    for task in tqdm(tasks, desc=f"{model}: ids"):
        before, after = (worker.run(task)["tokens"] for worker in workers)
        tokens += sum(map(len, after))
        if before != after:
            different.append(f"{task.label} {task.settings}")
    print(
        f"{model}: {len(tasks)} calls, {tokens} tokens; {len(different)} calls differ", *different, sep="\n  "
    )
    return not different


def compare_times(
    workers: Sequence[Worker], model: str, tasks: Sequence[Task], repeats: int, at_least: float
) -> bool:
    """Print each accelerator's median of seconds before / after, and return whether all reach `at_least`."""
    ratios: dict[str, list[float]] = {task.label: [] for task in tasks}
    for label in ratios:  # warm-up
        for worker in workers:
            worker.run(next(task for task in tasks if task.label == label))
    for repeat in tqdm(range(repeats), desc=f"{model}: times"):
        for index, task in enumerate(tasks):
            first = (repeat + index) % 2
            seconds = {side: workers[side].run(task)["seconds"] for side in (first, 1 - first)}
            ratios[task.label].append(seconds[0] / seconds[1])
    print(
        f"{model}: CPU seconds before / after, medians over {len(tasks) // len(ratios)} prompts, "
        f"{repeats} repeats"
    )
    for label, found in ratios.items():
        print(f"  {label.split(':')[0]}: {median(found):.3f} ({len(found)} pairs)", flush=True)
    return all(median(found) >= at_least for found in ratios.values())


def main(
    before: Annotated[str, typer.Argument(help="Older commit.")],
    after: Annotated[str, typer.Argument(help="Newer commit.")] = "HEAD",
    model: Annotated[str | None, typer.Option(help=f"{' or '.join(DEFAULTS)}; default: all.")] = None,
    prompts: Annotated[int, typer.Option(min=0, help="Batch size of the comparison of ids; 0: none.")] = 3,
    repeats: Annotated[int, typer.Option(min=0, help="Timed calls per prompt; 0 for no timing.")] = 0,
    timed_prompts: Annotated[int, typer.Option(min=1, help="Number of timed prompts, one per call.")] = 20,
    at_least: Annotated[float, typer.Option(help="Least median of seconds before / seconds after.")] = 0.97,
) -> None:
    """Compare the token ids of every accelerator in two commits, and optionally their times."""
    passed = True
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        codes = [unpack(before, folder / "before"), unpack(after, folder / "after")]
        for one in DEFAULTS if model is None else [model]:
            workers = [Worker(code, ASSETS / one) for code in codes]
            try:
                labels = DEFAULTS[one] + OTHERS.get(one, [])
                if prompts:
                    passed &= compare_ids(workers, one, list_tasks(one, labels, [range(prompts)], folder))
                if repeats:
                    batches = [[index] for index in range(timed_prompts)]
                    tasks = list_tasks(one, DEFAULTS[one], batches, folder)
                    passed &= compare_times(workers, one, tasks, repeats, at_least)
            finally:
                for worker in workers:
                    worker.process.kill()
    raise typer.Exit(int(not passed))


if __name__ == "__main__":
    typer.run(main)
