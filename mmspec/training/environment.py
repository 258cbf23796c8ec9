"""Set-up of a training: seed, threads, accelerate; and the environment that it is recorded with."""

from __future__ import annotations

import importlib.util
import platform
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import Accelerator, DistributedDataParallelKwargs
from accelerate.utils import DistributedType
from torch import nn
from torch.distributed.fsdp import FSDPModule

from mmspec.errors import InputError, MissingDependencyError

__all__ = ["environment", "flush_subnormals", "open_accelerator", "prepare_training"]

SUBNORMAL = 2.0**-149  # the least number of float32


def prepare_training(seed: int, threads: int | None) -> None:
    """Fix the weights' seed, and the number of threads where one is given."""
    if threads is not None:
        torch.set_num_threads(threads)
    torch.manual_seed(seed)


@contextmanager
def flush_subnormals() -> Iterator[None]:
    """Let the processor take subnormal numbers for zero, and leave it as it was.

    Without it, activations that fade to such numbers slow a training on a CPU down several times half-way.
    """
    was_flushing = bool(torch.tensor(SUBNORMAL) * 1 == 0)  # torch does not say
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(was_flushing)


def open_accelerator(accumulate: int = 1, log: tuple[Path, str] | None = None) -> Accelerator:
    """Open what `accelerate launch` gives, with bfloat16 autocast on a GPU.

    Args:
        accumulate: batches in a step.
        log: folder for tensorboard, and the name of the run in it.

    Raises:
        InputError: no such number of batches, or weights are to be sharded in a way that Muon cannot bear.
        MissingDependencyError: tensorboard is not installed, or torch is too old for FSDP.
    """
    if accumulate < 1:
        raise InputError("accumulate", accumulate, "at least 1")
    if log is not None and importlib.util.find_spec("tensorboard") is None:
        raise MissingDependencyError("writing logs needs tensorboard: pip install 'mmspec[train]'")
    accelerator = Accelerator(
        mixed_precision="bf16" if torch.cuda.is_available() else "no",
        gradient_accumulation_steps=accumulate,
        log_with=None if log is None else "tensorboard",
        project_dir=None if log is None else log[0],
        # a batch without images leaves a compressor without gradients
        kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)],
    )
    kind = accelerator.distributed_type
    flat = kind == DistributedType.FSDP and not accelerator.is_fsdp2
    if flat or kind in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
        allowed = (
            "several processes with whole weights, or FSDP of version 2 (`--use_fsdp --fsdp_version 2`): the "
            "optimizer needs matrices, which the others cut into flat pieces"
        )
        raise InputError("accelerate launch", f"{kind.value}{', version 1' if flat else ''}", allowed)
    if accelerator.is_fsdp2 and not hasattr(FSDPModule, "set_reduce_scatter_unused_params"):
        raise MissingDependencyError("training with FSDP needs torch 2.13: pip install 'torch>=2.13'")
    if log is not None:
        accelerator.init_trackers(log[1])
    return accelerator


def environment(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """Describe where and with what a model was trained."""
    if accelerator.device.type == "cuda":
        device = f"{accelerator.num_processes} x {torch.cuda.get_device_name()}"
    else:
        device = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    made = {"parameters": parameters, "device": device, "torch": str(torch.__version__)}
    return made | ({"processes": accelerator.num_processes} if accelerator.num_processes > 1 else {})
