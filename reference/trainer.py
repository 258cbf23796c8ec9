"""Shared parts of the trainers: batches of new scenes, evaluation on held-out scenes, and saving."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mmspec.scenes import training_seeds
from mmspec.training.record import half_precision, training_record
from mmspec.training.run import Batch, Stage, Training

__all__ = ["finish", "float8_matrices", "held_out_figures", "train_on_scenes"]


def train_on_scenes(
    training: Training,
    learner: nn.Module,
    batch: Callable[[np.ndarray], Batch],
    held_out: Batch,
    *,
    title: str,
    stage: int,
    count: int | None = None,
    digits: int = 3,
    **rates: Any,
) -> None:
    """Train a learner in one stage, on new scenes in every step.

    Args:
        training: a training that has not started.
        learner: module whose `learner(batch)` returns the loss and a table of figures.
        batch: function from the seeds of scenes to the batch of a step.
        held_out: batch on which the learner is evaluated.
        title: title of the stage.
        stage: a number that no other training uses, so that no two trainings draw the same scenes.
        count: scenes per step and process; the default is the batch size.
        digits: decimal places of the held-out figures.
        rates: further keywords of `Stage`.
    """
    accelerator = training.accelerator

    def make(step: int) -> Batch:
        number = count or training.batch_size
        return batch(training_seeds(training.seed, stage, step, accelerator.process_index, number))

    check = held_out_figures(held_out, accelerator.device, digits)
    training.train(Stage(title, learner, make, check, **rates))


def held_out_figures(
    batch: Batch, device: torch.device, digits: int = 3
) -> Callable[[nn.Module], dict[str, float]]:
    """Make the `check` of a `Stage`: the figures that the learner returns for a held-out batch, rounded."""

    def check(module: nn.Module) -> dict[str, float]:
        _, figures = module(batch.to(device))
        return {name: round(float(value), digits) for name, value in figures.items()}

    return check


def finish(
    training: Training,
    out: Path,
    save: Callable[[dict[str, Any]], None],
    *,
    command: str,
    options: Mapping[str, Any],
    model: nn.Module,
    program: str = "python -m reference",
    before: Sequence[Mapping[str, Any]] = (),
    **more: Any,
) -> Path:
    """Save a trained model with its record in the main process, and return the folder when it is complete.

    Args:
        training: the finished training.
        out: the folder to write.
        save: function that writes the model, given its record.
        command: the subcommand of `train` that ran the training.
        options: options of the command.
        model: the trained model.
        program: the program that `train` belongs to.
        before, more: see `training_record`.
    """
    if training.accelerator.is_main_process:
        name = f"{program} train {command}"
        save(training_record(name, {"out": out, **options}, training, model, before, **more))
    training.accelerator.wait_for_everyone()
    return out


def float8_matrices(model: nn.Module, within: str) -> dict[str, torch.Tensor]:
    """Return the weights: in float8 (e4m3) matrices whose names contain `within`, in fp16 all others."""
    stored = half_precision(model)
    for name, weight in model.state_dict().items():
        if weight.dim() == 2 and weight.is_floating_point() and within in name:
            stored[name] = weight.detach().cpu().to(torch.float8_e4m3fn).contiguous()
    return stored
