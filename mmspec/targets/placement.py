"""Device that a module computes on, wherever its weights are between forwards."""

from __future__ import annotations

import torch
from torch import nn

from mmspec.models.weights import hooks_of

__all__ = ["execution_device"]


def execution_device(*modules: nn.Module) -> torch.device:
    """Device of the first module that accelerate moves to one; else that of the last module's weights.

    Offloaded weights lie on the CPU, or nowhere, until a hook of accelerate brings them for a forward; such
    hooks may be on the innermost modules alone.
    """
    for module in (*modules, *modules[-1].modules()):
        for hook in hooks_of(module):
            if (place := getattr(hook, "execution_device", None)) is not None:
                return torch.device(place)
    return next(modules[-1].parameters()).device
