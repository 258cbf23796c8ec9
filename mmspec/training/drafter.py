"""Trains drafters, one trainer for all: the target runs along, frozen, and each drafter brings its loss."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn
from transformers import AutoConfig, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from mmspec.errors import CheckpointError, InputError
from mmspec.targets import CausalTarget
from mmspec.training.checkpointing import load_state
from mmspec.training.drafter_conversations import open_conversations
from mmspec.training.drafter_data import DrafterBatch, DrafterData, acceptance_length
from mmspec.training.drafter_methods import METHODS, check_method, written
from mmspec.training.drafter_pictures import PictureFile
from mmspec.training.drafter_scenes import ScenePictures, open_llamagen
from mmspec.training.environment import environment, prepare_training
from mmspec.training.schedule import Budget
from mmspec.training.stage import OnStep, Run, Stage, train_stage
from mmspec.training.vlm_folder import half_precision

__all__ = ["train_drafter", "train_on"]

DEFAULT_MINUTES = 10.0
RATE = 2.0  # one layer bears twice the rate of deep models


def train_drafter(
    target: str | Path,
    out: str | Path,
    *,
    method: str = "eagle",
    settings: Mapping[str, Any] | None = None,
    data: str | Path | None = None,
    start: str | Path | None = None,
    minutes: float | None = None,
    steps: int | None = None,
    batch_size: int = 8,
    seed: int = 0,
    resume: bool = False,
    threads: int | None = None,
    state: str | Path | None = None,
    checkpoint_s: float = 60.0,
    check_s: float = 120.0,
    on_step: OnStep | None = None,
) -> Path:
    """Train a drafter for a target and save it as a folder that `drafter=` takes.

    Runs on whatever `accelerate launch` gives it: a CPU, one GPU or several.

    Args:
        target: the folder of a vision-language model, or of an image model that `mmspec train image` wrote.
        out: the folder to write.
        method: a name in `METHODS`.
        settings: of the drafter and its loss, such as `{"block": 10}`.
        data: a JSONL file of pictures (see `PictureFile`); None for scenes.
        start: a trained drafter to begin with, instead of random weights; its target may have changed since.
        minutes: length of the training; 10 where neither this nor `steps` is given.
        steps: length in optimizer steps instead; the result is then reproducible.
        batch_size: sequences per step and process.
        seed: of the weights and of all sequences.
        resume: go on from the state file of an interrupted run.
        threads: CPU threads; None leaves the number as it is.
        state: file of the training state; by default `<out>.training.pt` beside the folder.
        checkpoint_s: seconds between two states on disk.
        check_s: seconds between two measurements of the acceptance length on held-out prompts.
        on_step: called with (step, loss) after every step.

    Returns:
        The folder. Its `training.json` records how it was made.

    Raises:
        InputError: no such method or setting, or a budget that is none.
        CheckpointError: the target cannot be read, or is of no family that data is known for.
    """
    settings = dict(settings or {})
    check_method(method, settings)
    if minutes is None and steps is None:
        minutes = DEFAULT_MINUTES
    budget = Budget(steps, None if minutes is None else minutes * 60)
    prepare_training(seed, threads)
    out, folder = Path(out), Path(target)
    accelerator = Accelerator(mixed_precision="bf16" if torch.cuda.is_available() else "no")
    file = None if data is None else Path(data)
    teacher, source = open_target(folder, accelerator.device, batch_size, seed, file)
    model = METHODS[method].build(teacher, **settings)
    before = [] if start is None else take_weights(model, Path(start))
    state_path = Path(state) if state is not None else out.with_name(f"{out.name}.training.pt")
    run = Run(accelerator, model, state_path, checkpoint_s, check_s, on_step)
    if resume:
        run.restore(load_state(state_path))
    train_on(run, method, teacher, source, budget, settings)
    if accelerator.is_main_process:
        length = f"--minutes {minutes:g}" if minutes is not None else f"--steps {steps}"
        length += "" if data is None else f" --data {Path(data).as_posix()}"
        length += "" if start is None else f" --from {Path(start).as_posix()}"
        command = f"mmspec train drafter --target {folder.as_posix()} --method {written(method, settings)}"
        record = {
            "command": f"{command} --out {out.as_posix()} {length}",
            "method": method,
            "target": folder.name,
            "seed": seed,
            "batch_size": batch_size,
            "stages": [*before, *run.finished],
        }
        save_drafter(model, out, record | environment(accelerator, model))
    accelerator.wait_for_everyone()
    return out


def train_on(
    run: Run,
    method: str,
    target: CausalTarget,
    data: DrafterData,
    budget: Budget,
    settings: Mapping[str, Any] | None = None,
) -> None:
    """Train the model of a run on any data; the trainer's part that knows no folder."""
    learner, trial = METHODS[method].learn(run.model, target, **settings or {}), data.trial()

    def make(step: int) -> DrafterBatch:
        return data.batch(step, run.accelerator.process_index)

    def check(module: nn.Module) -> dict[str, float]:
        drafter = METHODS[method].drafter(run.model.eval())
        length = acceptance_length(target, drafter, trial)
        run.model.train()
        return {"acceptance": round(length, 3)}

    stage = Stage(method, learner, make, check, slow="head.", slow_factor=RATE)
    train_stage(run, stage, budget)


def open_target(
    folder: Path, device: torch.device, batch_size: int, seed: int, data: Path | None = None
) -> tuple[CausalTarget, DrafterData]:
    """The frozen target of a folder, and what its drafters learn from.

    Raises:
        CheckpointError: it cannot be read, or is of no family that data is known for.
        InputError: the file of data cannot be used.
    """
    try:
        kind = AutoConfig.from_pretrained(folder).model_type
    except (OSError, ValueError, KeyError) as error:
        raise CheckpointError("target", str(folder), f"the folder of a model ({error})"[:300]) from error
    if kind in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES:
        if data is not None:
            raise InputError("data", str(data), "nothing: vision-language models learn from scenes so far")
        return open_conversations(folder, device, batch_size, seed)
    if kind != "llamagen":
        raise CheckpointError(
            "target",
            kind,
            "a vision-language model, or a LlamaGen as `mmspec train image` and `mmspec convert` write it",
        )
    target = open_llamagen(folder, device)
    if data is not None:
        return target, PictureFile(target, folder, batch_size, seed, data)
    return target, ScenePictures(target, folder, batch_size, seed)


def take_weights(model: PreTrainedModel, folder: Path) -> list[dict[str, Any]]:
    """Take over a trained drafter; returns the stages of its training.

    Raises:
        CheckpointError: there is none of the same shape in the folder.
    """
    try:
        config = AutoConfig.from_pretrained(folder)
        if type(config) is not type(model.config):
            raise ValueError(config.model_type)
        donor = type(model).from_pretrained(folder, dtype=torch.float32)
        model.load_state_dict(donor.state_dict())
        stages: list[dict[str, Any]] = json.loads((folder / "training.json").read_text())["stages"]
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        allowed = "a drafter that `mmspec train drafter` wrote for a target of the same shape"
        raise CheckpointError("start", str(folder), allowed) from error
    return stages


def save_drafter(model: PreTrainedModel, folder: Path, training: dict[str, Any]) -> None:
    """Save in half precision on disk, single in memory, with the record of the training."""
    model.save_pretrained(folder, state_dict=half_precision(model))
    path = folder / "config.json"
    config = json.loads(path.read_text()) | {"dtype": "float32"}
    path.write_text(json.dumps(config, indent=2) + "\n")
    (folder / "training.json").write_text(json.dumps(training, indent=2) + "\n")
