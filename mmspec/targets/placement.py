"""Device that a module computes on, wherever its weights are between forwards."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

__all__ = ["execution_device"]


def execution_device(*modules: nn.Module) -> torch.device:
    """Device of the first module that accelerate moves to one; else that of the last module's weights.

    Offloaded weights lie on the CPU, or nowhere, until a hook of accelerate brings them for a forward.
    """
    for module in modules:
        hook: Any = getattr(module, "_hf_hook", None)
        for each in getattr(hook, "hooks", [hook]):
            if (place := getattr(each, "execution_device", None)) is not None:
                return torch.device(place)
    return next(modules[-1].parameters()).device
