"""What every training does before its first step, and where and with what it was done."""

from __future__ import annotations

import platform
from typing import Any

import torch
from accelerate import Accelerator
from torch import nn

__all__ = ["environment", "prepare_training"]


def prepare_training(seed: int, threads: int | None) -> None:
    """Fix the weights' seed, and the number of threads where one is given."""
    if threads is not None:
        torch.set_num_threads(threads)
    # Without it, activations that fade to denormal numbers slow a CPU run down several times half-way.
    torch.set_flush_denormal(True)
    torch.manual_seed(seed)


def environment(accelerator: Accelerator, model: nn.Module) -> dict[str, Any]:
    """Where and with what a model was trained."""
    if accelerator.device.type == "cuda":
        device = f"{accelerator.num_processes} x {torch.cuda.get_device_name()}"
    else:
        device = f"CPU ({platform.machine()}), {torch.get_num_threads()} threads"
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {"parameters": parameters, "device": device, "torch": str(torch.__version__)}
