"""Runs of a training: accumulated steps, logs, interruptions, several processes."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.errors import CheckpointError, MissingDependencyError
from mmspec.training.drafter import train_on
from mmspec.training.recipes import RECIPES
from mmspec.training.run import (
    RunOptions,
    Training,
    open_accelerator,
)
from tests.packaging.source_tree import ROOT
from tests.tiny_models import save_family
from tests.training.own_answers import Sentences, speaker

SETTINGS = {"block": 4, "offset_size": 32, "bias_rank": 8, "own_guesses": 0.0}


class Interrupted(Exception):
    pass


def train(
    folder: Path, steps: int, rows: int = 4, *, accumulate: int = 1, resume: bool = False, stop: int = 0
):
    """A FLASH head's weights and the losses of its steps."""
    teacher, losses = speaker(), []  # made first: it draws random weights, too
    torch.manual_seed(0)

    def record(step: int, loss: float) -> None:
        losses.append(loss)
        if step == stop:
            raise Interrupted

    head = RECIPES["flash"].build(teacher, **SETTINGS)
    options = RunOptions(steps=steps, checkpoint_s=0.0 if stop else 1e9, check_s=1e9)
    options |= RunOptions(on_step=record, resume=resume)
    training = Training(folder / "out", options, minutes=1.0, batch_size=rows, accumulate=accumulate)
    with contextlib.suppress(Interrupted):
        train_on(training, head, "flash", teacher, Sentences(rows), SETTINGS)
    return head.eval(), losses


def test_a_step_of_several_batches_is_one_of_all_their_rows(tmp_path: Path) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmspec.methods.flash.loss.NOISE", 0.0)
        whole, losses = train(tmp_path, 3, rows=6)
        parts, means = train(tmp_path, 3, rows=2, accumulate=3)
    assert losses == pytest.approx(means, rel=1e-4) and losses[0] != losses[1]
    for name, ours in parts.state_dict().items():
        assert torch.allclose(ours, whole.state_dict()[name], atol=1e-4), name


def test_progress_is_shown_in_whole_percent(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    train(tmp_path, 3, stop=1)
    train(tmp_path, 3, stop=0, resume=True)
    shown = capsys.readouterr().err
    assert "| 0/100 [" in shown and "| 100/100 [" in shown and "/100.0" not in shown and ".33333" not in shown


def test_an_interrupted_run_of_several_batches_a_step_goes_on(tmp_path: Path) -> None:
    whole, losses = train(tmp_path, 6, rows=2, accumulate=2)
    train(tmp_path, 6, rows=2, accumulate=2, stop=4)
    resumed, rest = train(tmp_path, 6, rows=2, accumulate=2, resume=True)
    assert rest == losses[-len(rest) :] and 0 < len(rest) < 6
    theirs = whole.state_dict()
    assert all(torch.equal(ours, theirs[name]) for name, ours in resumed.state_dict().items())


def training_of(out: Path, **options: Any) -> Training:
    return Training(out, options, minutes=10.0, batch_size=8, check_s=120.0)  # type: ignore[arg-type]


def test_a_state_that_cannot_be_gone_on_from_is_refused(tmp_path: Path) -> None:
    """Missing, damaged, from an older mmspec, or of another model; a valid state is a single file."""
    path = tmp_path / "out.training.pt"
    with pytest.raises(CheckpointError, match="start without resume"):
        training_of(tmp_path / "out", steps=1, resume=True)
    torch.save({"stage": 0, "step": 1, "seconds": 1.0, "finished": [], "model": {}, "learner": {}}, path)
    with pytest.raises(CheckpointError, match="this version of mmspec wrote"):
        training_of(tmp_path / "out", steps=1, resume=True)
    train(tmp_path, 1)
    assert [file.name for file in tmp_path.iterdir()] == ["out.training.pt"]
    other = RECIPES["flash"].build(speaker(), **SETTINGS | {"block": 3})
    with pytest.raises(CheckpointError, match="of the same model"):
        train_on(training_of(tmp_path / "out", steps=1, resume=True), other, "flash", speaker(), Sentences())
    path.write_bytes(path.read_bytes()[:50])
    with pytest.raises(CheckpointError, match="state that can be read"):
        training_of(tmp_path / "out", steps=1, resume=True)


def test_logs_hold_the_loss_its_parts_and_the_acceptance_length(
    hide: Callable[..., None], tmp_path: Path
) -> None:
    reading = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    losses: list[float] = []
    options = RunOptions(steps=3, check_s=0.0, on_step=lambda _, loss: losses.append(loss))
    training = Training(tmp_path / "mine", options, minutes=1.0, batch_size=2, log_dir=tmp_path)
    train_on(training, RECIPES["flash"].build(speaker(), **SETTINGS), "flash", speaker(), Sentences(2))
    training.accelerator.end_training()
    (folder,) = {path.parent for path in (tmp_path / "mine").rglob("*tfevents*")}
    events = reading.EventAccumulator(str(folder)).Reload()
    parts = {"states", "tokens", *(f"agreement/{offset}" for offset in range(4))}
    assert parts | {"loss", "learning_rate", "acceptance"} <= set(events.Tags()["scalars"])
    assert [event.value for event in events.Scalars("loss")] == pytest.approx(losses)
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3]
    hide("tensorboard")
    with pytest.raises(MissingDependencyError, match=r"pip install -e '\.\[train\]'"):
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
