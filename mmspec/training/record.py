"""Trained models on disk: weights in half precision, and the record of how they were made."""

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
    """The record of a training: its command, seed, batch size, stages, device and versions.

    Args:
        command: without its options, such as `mmspec train drafter`.
        options: of the command, by name; those that are None are left out, and True is a flag.
        training: that is done.
        model: whose parameters are counted.
        before: stages of the model that it began with.
        more: entries of the record.
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
    """Save a model in half precision, with a config by which it is loaded in single precision.

    Args:
        model: of transformers.
        folder: to write.
        training: its record, if there is to be one.
        parts: configs inside the config that say their own precision.
        weights: as they are stored, where not in half precision.
    """
    model.save_pretrained(folder, state_dict=half_precision(model) if weights is None else weights)
    # transformers loads in the dtype that config.json names; half precision is many times slower on a CPU.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    for table in (config, *(config[part] for part in parts)):
        table["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")
    if training is not None:
        write_record(folder, training)


def write_record(folder: Path, training: Mapping[str, object]) -> None:
    """Write the record of a training into the model's folder."""
    (folder / RECORD).write_text(json.dumps(training, indent=2) + "\n")


def half_precision(model: nn.Module) -> dict[str, torch.Tensor]:
    """The weights in fp16, on the CPU, contiguous; buffers of other kinds as they are."""
    return {
        name: tensor.detach()
        .to("cpu", torch.float16 if tensor.is_floating_point() else tensor.dtype)
        .contiguous()
        for name, tensor in model.state_dict().items()
    }


def taken_over(start: str | Path | None, allowed: str, load: Callable[[Path], object]) -> list[Json]:
    """Load the weights of a trained folder, if there is one; returns the stages of its training.

    Raises:
        CheckpointError: the weights, or the folder's record, cannot be read or do not fit.
    """
    if start is None:
        return []
    try:
        stages: list[Json] = json.loads((Path(start) / RECORD).read_text())["stages"]
        load(Path(start))
    except (OSError, ValueError, KeyError, RuntimeError) as error:
        raise CheckpointError("start", str(start), allowed) from error
    return stages


def _shown(value: object) -> str:
    """An option's value on the command line."""
    if isinstance(value, float):
        return f"{value:g}"
    return value.as_posix() if isinstance(value, Path) else str(value)
