"""Parts that the trainers share: batches of fresh scenes, figures of held-out ones, the folder in the end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.scenes import training_seeds
from mmspec.training.record import half_precision, training_record
from mmspec.training.run import Batch, Stage, Training

__all__ = ["check_known", "finish", "float8_matrices", "held_out_figures", "train_on_scenes"]


def check_known(argument: str, value: str, known: Iterable[str]) -> None:
    """Refuse an unknown name.

    Raises:
        InputError: with the nearest that is known.
    """
    if value not in known:
        raise InputError(argument, value, did_you_mean(value, known))


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
    """Train a learner, in one stage, on scenes that no step and no figure has seen before.

    Args:
        training: at its beginning.
        learner: returns the loss and figures.
        batch: (seeds of scenes) -> the batch of a step.
        held_out: whose figures are shown, with so many `digits`.
        title: of the stage.
        stage: number that no other training has, so that no two draw the same scenes.
        count: scenes of a step and process; by default the batch size.
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
    """Make the check of a learner that returns its figures beside the loss: those of held-out data."""

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
    """Let the main process save a trained model with its record; returns the folder, once it is there.

    Args:
        training: that is done.
        out: the folder.
        save: writes the model with a record.
        command: of `program`'s `train`.
        options: of the command.
        program: whose command it is.
        model, before, more: see `training_record`.
    """
    if training.accelerator.is_main_process:
        name = f"{program} train {command}"
        save(training_record(name, {"out": out, **options}, training, model, before, **more))
    training.accelerator.wait_for_everyone()
    return out


def float8_matrices(model: nn.Module, within: str) -> dict[str, torch.Tensor]:
    """The weights: matrices in float8 (e4m3) if `within` is part of their names ("" is), all else in fp16."""
    stored = half_precision(model)
    for name, weight in model.state_dict().items():
        if weight.dim() == 2 and weight.is_floating_point() and within in name:
            stored[name] = weight.detach().cpu().to(torch.float8_e4m3fn).contiguous()
    return stored
