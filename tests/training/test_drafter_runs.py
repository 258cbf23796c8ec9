"""How a drafter's training runs: accumulated steps, logs, several processes, and a head that gets better."""

from __future__ import annotations

import contextlib
import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.errors import InputError, MissingDependencyError
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, TrainingExample, Trial, acceptance_length
from mmspec.training.drafter import train_on
from mmspec.training.environment import open_accelerator
from mmspec.training.methods import METHODS
from mmspec.training.schedule import Budget
from mmspec.training.stage import TrainingRun
from tests.contracts.mutation import PlantedBug
from tests.contracts.running import random_prompts
from tests.packaging.source_tree import ROOT
from tests.tiny_models import save_family, tiny_llama

WORDS, LENGTH, POOL = 12, 24, 200
SETTINGS = {"block": 4, "offset_size": 32, "bias_rank": 8, "own_guesses": 0.0}


@functools.cache
def target() -> CausalTarget:
    return CausalTarget(tiny_llama(vocab=WORDS).requires_grad_(False))


@functools.cache
def sentences() -> torch.Tensor:
    """[POOL, 3 + LENGTH] random prompts and what the target says after them."""
    tokens = torch.tensor(
        [(*prompt, 1, 2, 3)[:3] for prompt in random_prompts(POOL, WORDS, longest=4, seed=1)]
    )
    for _ in range(LENGTH):
        said = target().model(tokens).logits[:, -1].argmax(-1)
        tokens = torch.cat([tokens, said[:, None]], 1)
    return tokens


class Sentences:
    """Data of the target's own words; the last four are held out.

    Args:
        rows: a step and process; of every `rows * per` the step's part, so that steps can be cut in several.
    """

    def __init__(self, rows: int = 4) -> None:
        self.rows = rows

    def batch(self, step: int, process: int) -> DrafterBatch:
        places = [(self.rows * step + row) % (POOL - 4) for row in range(self.rows)]
        return DrafterBatch(tuple(TrainingExample({"input_ids": sentences()[[row]]}, 3) for row in places), 7)

    def trial(self) -> Trial:
        return Trial([Request({"input_ids": row[None, :3]}) for row in sentences()[-4:]], Sampler(), LENGTH)


class Interrupted(Exception):
    pass


def train(
    folder: Path, steps: int, rows: int = 4, *, accumulate: int = 1, resume: bool = False, stop: int = 0
):
    """A FLASH head's weights and the losses of its steps."""
    teacher, losses = target(), []  # made first: it draws random weights, too
    torch.manual_seed(0)

    def record(step: int, loss: float) -> None:
        losses.append(loss)
        if step == stop:
            raise Interrupted

    head = METHODS["flash"].build(teacher, **SETTINGS)
    run = TrainingRun(
        open_accelerator(accumulate), head, folder / "state.pt", 0.0 if stop else 1e9, 1e9, record
    )
    if resume:
        run.restore(torch.load(folder / "state.pt", weights_only=True))
    with contextlib.suppress(Interrupted):
        train_on(run, "flash", teacher, Sentences(rows), Budget(steps), SETTINGS)
    return head.eval(), losses


@pytest.mark.slow
def test_two_hundred_steps_accept_half_a_token_more(tmp_path: Path) -> None:
    """A trained head drafts more than an untrained one; and not one bit of the target has changed."""
    before = {name: value.clone() for name, value in target().model.state_dict().items()}
    torch.manual_seed(0)
    untrained = METHODS["flash"].drafter(METHODS["flash"].build(target(), **SETTINGS).eval())
    head, losses = train(tmp_path, 200)
    trial = Sentences().trial()
    gained = acceptance_length(target(), METHODS["flash"].drafter(head), trial) - acceptance_length(
        target(), untrained, trial
    )
    assert gained >= 0.5 and sum(losses[-10:]) < 0.8 * sum(losses[:10])
    assert not target().model.training
    assert all(parameter.grad is None for parameter in target().model.parameters())
    assert all(torch.equal(before[name], value) for name, value in target().model.state_dict().items())


def a_step_of_several_batches_is_one_of_all_their_rows(folder: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmspec.training.losses.flash.NOISE", 0.0)
        whole, losses = train(folder, 3, rows=6)
        parts, means = train(folder, 3, rows=2, accumulate=3)
    assert losses == pytest.approx(means, rel=1e-4) and losses[0] != losses[1]
    for name, ours in parts.state_dict().items():
        assert torch.allclose(ours, whole.state_dict()[name], atol=1e-4), name


def test_a_step_of_several_batches_is_one_of_all_their_rows(tmp_path: Path) -> None:
    a_step_of_several_batches_is_one_of_all_their_rows(tmp_path)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("stage.make(index)", "stage.make(run.step)"),
        ("accelerator.backward(loss)", "accelerator.backward(loss * (index % count == 0))"),
        ("/ count", "/ 1"),
    ],
)
def test_a_planted_bug_of_accumulation_is_caught(old: str, new: str, tmp_path: Path) -> None:
    bug = PlantedBug("mmspec.training.stage:_step", ((old, new),), lambda: None)
    with bug.planted(), pytest.raises(AssertionError):
        a_step_of_several_batches_is_one_of_all_their_rows(tmp_path)


def test_an_interrupted_run_of_several_batches_a_step_goes_on(tmp_path: Path) -> None:
    whole, losses = train(tmp_path, 6, rows=2, accumulate=2)
    train(tmp_path, 6, rows=2, accumulate=2, stop=4)
    resumed, rest = train(tmp_path, 6, rows=2, accumulate=2, resume=True)
    assert rest == losses[-len(rest) :] and 0 < len(rest) < 6
    theirs = whole.state_dict()
    assert all(torch.equal(ours, theirs[name]) for name, ours in resumed.state_dict().items())


def test_no_batches_make_no_step() -> None:
    with pytest.raises(InputError, match="accumulate"):
        open_accelerator(0)


def test_logs_hold_the_loss_its_parts_and_the_acceptance_length(tmp_path: Path) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    torch.manual_seed(0)
    accelerator = open_accelerator(1, (tmp_path, "mine"))
    losses: list[float] = []
    run = TrainingRun(
        accelerator,
        METHODS["flash"].build(target(), **SETTINGS),
        tmp_path / "state.pt",
        1e9,
        0.0,
        lambda _, loss: losses.append(loss),
    )
    train_on(run, "flash", target(), Sentences(2), Budget(3))
    accelerator.end_training()
    (folder,) = {path.parent for path in (tmp_path / "mine").rglob("*tfevents*")}
    events = reading.EventAccumulator(str(folder)).Reload()
    parts = {"states", "tokens", *(f"agreement/{offset}" for offset in range(4))}
    assert parts | {"loss", "learning_rate", "acceptance"} <= set(events.Tags()["scalars"])
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]


def test_logs_without_tensorboard_are_refused(hide: Callable[..., None], tmp_path: Path) -> None:
    hide("tensorboard")
    with pytest.raises(MissingDependencyError, match=r"mmspec\[train\]"):
        open_accelerator(1, (tmp_path, "mine"))


@pytest.mark.slow
def test_two_processes_train_one_head(tmp_path: Path) -> None:
    """Different rows in each, one file in the end, and both end after the same step."""
    folder = save_family("llava", tmp_path / "target")
    rows = [{"prompt": "describe the circle", "response": "the circle is red"}] * 8
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    # what `accelerate launch` starts for several GPUs
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    command += ["-m", "mmspec", "train", "drafter", "--target", str(folder)]
    command += ["--data", str(tmp_path / "rows.jsonl"), "--out", str(tmp_path / "out"), "--method", "flash"]
    command += ["--minutes", "0.03", "--batch-size", "2"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ACCELERATE_USE_CPU": "true"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    made = json.loads((tmp_path / "out" / "training.json").read_text())
    assert made["stages"][0]["steps"] >= 1 and made["processes"] == 2
