"""Training of drafters on the hidden states of a frozen target, which are computed on the fly or stored."""

from __future__ import annotations

from collections.abc import Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any, Unpack

import torch
from torch import nn
from transformers import AutoConfig, PreTrainedModel

from mmspec.errors import InputError
from mmspec.open_types import Json, Keywords
from mmspec.targets import CausalTarget
from mmspec.training.data.audio import AudioRows
from mmspec.training.data.sequences import DrafterBatch, DrafterData, acceptance_length
from mmspec.training.data.sources import MakeData, Rows, open_target
from mmspec.training.data.states import StoredStates
from mmspec.training.recipes import RECIPES, check_method, written
from mmspec.training.record import save_trained, taken_over, training_record
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals

__all__ = ["train_drafter", "train_on"]

DEFAULT_MINUTES = 10.0
MEASURED_BATCHES = 8


@flush_subnormals()
def train_drafter(
    target: str | Path,
    out: str | Path,
    data: Rows | MakeData,
    *,
    method: str = "eagle",
    settings: Mapping[str, object] | None = None,
    max_length: int | None = None,
    regenerate: int = 0,
    learn_prompts: bool = False,
    dtype: str = "auto",
    states: str | Path | None = None,
    start: str | Path | None = None,
    accumulate: int = 1,
    log_dir: str | Path | None = None,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a drafter for a target and save it as a folder, for use as `drafter=`.

    Runs on the devices that `accelerate launch` provides: a CPU, one GPU or several.

    Args:
        target: folder or hub id of a vision-language, language or speech model, or the folder of a LlamaGen.
        out: the folder to write.
        method: a name in `RECIPES`.
        settings: settings of the drafter and its loss, such as `{"block": 10}`.
        data: conversations, as a file or as rows (see `read_conversations`); for image models a JSONL file
            of images (see `ImageFile`), for speech models one of audio (see `read_clips`); or a function that
            makes data (see `MakeData`), like `ImagePrompts`.
        max_length: longer conversations, in tokens, are skipped. None uses the limit of the target.
        regenerate: maximum length, in tokens, of replies that the target generates to replace those of the
            data; 0 keeps the replies of the data.
        learn_prompts: whether to learn the target's predictions on all text of the conversations, instead of
            on the replies alone. Useful for data with few or short replies.
        dtype: dtype of the target: "float32", "bfloat16", "float16", or "auto" (see `pick_dtype`). Drafters
            train in float32, under bfloat16 autocast on a GPU or if the target is not in float32.
        states: folder that stores the target's hidden states of every sequence, so that further trainings on
            the same data do not run the target again; see `StoredStates`.
        start: a trained drafter to start from, instead of random weights; its target may have changed since.
        accumulate: number of batches per optimizer step.
        log_dir: folder for TensorBoard logs: losses, learning rate, tokens per forward pass.
        how: see `RunOptions`; the defaults are 10 minutes and a batch size of 8 sequences.

    Returns:
        The folder. Its `training.json` records the training, and the rows that the main process skipped
        since the start or the last resume.

    Raises:
        InputError: the method, a setting or the length is not allowed, or `states` belongs to another target
            or to data that change in every step.
        CheckpointError: the target cannot be read, or its family has no known training data.
        MissingDependencyError: `log_dir` is given and TensorBoard is not installed.
    """
    settings = dict(settings or {})
    check_method(method, settings)
    out = Path(out)
    training = drafter_training(out, how, accumulate, log_dir)
    accelerator = training.accelerator
    reading: Keywords = {"dtype": dtype, "max_length": max_length, "regenerate": regenerate}
    reading |= {"states": states, "learn_prompts": learn_prompts}
    reading["image_method"] = method if RECIPES[method].record.of_images else None
    teacher, source = open_target(
        target, accelerator.device, training.batch_size, training.seed, data, **reading
    )
    if isinstance(source, AudioRows) and RECIPES[method].settings.keys() & {"compressor", "visual"}:
        rule = "must be a method without compression of images: the target transcribes audio"
        raise InputError("method", method, rule)
    stored = None if states is None else StoredStates(teacher, states)
    model = RECIPES[method].build(teacher, **settings)
    if not how.get("resume"):
        RECIPES[method].learner.prepare(model, source, teacher)
    expected = "a drafter that `mmspec train drafter` wrote for a target of the same shape"
    before = taken_over(start, expected, lambda folder: take_weights(model, folder))
    train_on(training, model, method, teacher, source, settings, stored)
    if accelerator.is_main_process:
        options = {
            "target": target,
            "method": written(method, settings),
            "out": out,
            **training.length,
            "data": data if isinstance(data, str | Path) else getattr(data, "file", None),
            "max-length": max_length,
            "regenerate": regenerate or None,
            "learn-prompts": learn_prompts or None,
            "dtype": None if dtype == "auto" else dtype,
            "states": states,
            "accumulate": accumulate if accumulate > 1 else None,
            "from": start,
        }
        about: Json = {
            "method": method,
            "target": Path(target).name,
            "target_dtype": str(teacher.dtype)[6:],
        }
        left_out = getattr(source, "left_out", {})
        about |= {"skipped_rows": left_out} if left_out else {}
        save_trained(
            model, out, training_record("mmspec train drafter", options, training, model, before, **about)
        )
    accelerator.wait_for_everyone()
    return out


def drafter_training(out: Path, how: RunOptions, accumulate: int, log_dir: str | Path | None) -> Training:
    """Set up a training with the defaults of drafters: ten minutes, batches of 8 sequences."""
    return Training(
        out,
        how,
        minutes=DEFAULT_MINUTES,
        batch_size=8,
        check_s=120.0,
        accumulate=accumulate,
        log_dir=None if log_dir is None else Path(log_dir),
    )


def train_on(
    training: Training,
    model: Any,
    method: str,
    target: CausalTarget,
    data: DrafterData,
    settings: Mapping[str, object] | None = None,
    stored: StoredStates | None = None,
) -> None:
    """Train a model by a method on data, and store the measured figures in its config."""
    learner, trial = RECIPES[method].learn(model, target, **settings or {}), data.trial()
    learner.stored = stored
    device, halved = training.accelerator.device, target.dtype != torch.float32

    def make(step: int) -> DrafterBatch:
        return learner.make(data, step, training.accelerator.process_index)

    def check(module: nn.Module) -> dict[str, float]:
        # measured in the dtype that it runs in: the target's
        checked = deepcopy(model).to(target.dtype) if model.dtype != target.dtype else model
        length = acceptance_length(target, RECIPES[method].drafter(checked.eval()), trial)
        model.train()
        return {"acceptance": round(length, 3)}

    rates: Keywords = {"slow": "head.", "slow_factor": learner.rate, "outer": learner.outer}
    training.train(Stage(method, learner, make, check, **rates, halved=halved))
    unseen = (make(training.step + ahead).to(device) for ahead in range(MEASURED_BATCHES))
    learner.eval()
    with torch.autocast(device.type, torch.bfloat16, enabled=halved):
        measured = learner.measure(unseen)
    for name, value in measured.items():
        setattr(model.config, name, value)


def take_weights(model: PreTrainedModel, folder: Path) -> None:
    """Load the weights of a trained drafter of the same type and shape."""
    config = AutoConfig.from_pretrained(folder)
    if type(config) is not type(model.config):
        raise ValueError(config.model_type)
    model.load_state_dict(type(model).from_pretrained(folder, dtype=torch.float32).state_dict())
