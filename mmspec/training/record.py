"""Saving of trained models: weights in half precision, and the `training.json` record of the training."""

from __future__ import annotations

import json
import platform
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import nn
from transformers import PreTrainedModel

from mmspec.errors import CheckpointError
from mmspec.open_types import Json
from mmspec.training.run import Training

__all__ = [
    "half_precision",
    "save_trained",
    "taken_over",
    "training_record",
    "write_record",
]

RECORD = "training.json"


def training_record(
    command: str,
    options: Mapping[str, object],
    training: Training,
    model: nn.Module,
    before: Sequence[Mapping[str, object]] = (),
    **more: object,
) -> Json:
    """Return the record of a training: its command, seed, batch size, stages, device and versions.

    Args:
        command: the command without its options, such as `mmspec train drafter`.
        options: options of the command by name. None leaves an option out, and True makes it a flag.
        training: the finished training.
        model: the model whose parameters are counted.
        before: stages of the model that the training started from.
        more: further entries of the record.
    """
    asked = {name: value for name, value in options.items() if value is not None}
    given = " ".join(
        f"--{name}" if value is True else f"--{name} {_shown(value)}" for name, value in asked.items()
    )
    accelerator = training.accelerator
    if accelerator.device.type == "cuda":
        device = f"{accelerator.num_processes} x {torch.cuda.get_device_name()}"
    else:
        device = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    made = {"command": f"{command} {given}", **more, "seed": training.seed}
    made |= {"batch_size": training.batch_size, "stages": [*before, *training.finished]}
    made |= {"parameters": sum(each.numel() for each in model.parameters()), "device": device}
    made |= {"torch": str(torch.__version__)}
    return made | ({"processes": accelerator.num_processes} if accelerator.num_processes > 1 else {})


def save_trained(
    model: PreTrainedModel,
    folder: Path,
    training: Mapping[str, object] | None = None,
    parts: Sequence[str] = (),
    weights: dict[str, torch.Tensor] | None = None,
) -> None:
    """Save a model in half precision, with a config that makes transformers load it in float32.

    Args:
        model: the transformers model.
        folder: the folder to write.
        training: the record to save as `training.json`; None saves none.
        parts: names of nested configs that have their own `dtype`.
        weights: the weights to store instead of the model's in half precision.
    """
    model.save_pretrained(folder, state_dict=half_precision(model) if weights is None else weights)
    # transformers loads in the dtype of config.json, and half precision is many times slower on a CPU
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for table in (config, *(config[part] for part in parts)):
        table["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")
    if training is not None:
        write_record(folder, training)


def write_record(folder: Path, training: Mapping[str, object]) -> None:
    """Write the record of a training to `training.json` in the model's folder."""
    (folder / RECORD).write_text(json.dumps(training, indent=2) + "\n")


def half_precision(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the state dict on the CPU, contiguous, with floating point tensors in float16."""
    return {
        name: tensor.detach()
        .to("cpu", torch.float16 if tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in model.state_dict().items()
    }


def taken_over(start: str | Path | None, expected: str, load: Callable[[Path], object]) -> list[Json]:
    """Load the weights of a trained folder unless `start` is None, and return the stages of its training.

    Args:
        start: the folder.
        expected: noun phrase for the error message: what the folder must be.
        load: loads the weights of the folder.

    Raises:
        CheckpointError: the weights or the folder's record cannot be read, or do not fit.
    """
    if start is None:
        return []
    try:
        stages: list[Json] = json.loads((Path(start) / RECORD).read_text())["stages"]
        load(Path(start))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError("start", str(start), f"must be {expected}") from error
    return stages


def _shown(value: object) -> str:
    """The value of an option in command line syntax."""
    if isinstance(value, float):
        return f"{value:g}"
    return value.as_posix() if isinstance(value, Path) else str(value)
