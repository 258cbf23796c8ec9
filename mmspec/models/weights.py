"""Weights of a loaded model, whether in memory, offloaded by accelerate, or quantised."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor, nn

from mmspec.models.replaced import computes_plainly

__all__ = [
    *("execution_device", "hooks_of", "is_finite", "is_offloaded", "is_plain_linear", "stored_weight"),
    "stored_weights",
]


def hooks_of(module: nn.Module) -> list[object]:
    """The hooks of accelerate on a module, which move its weights and inputs to its device."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def is_offloaded(model: nn.Module) -> bool:
    """True if some weights of a model are stored elsewhere, and loaded for each forward pass."""
    return any(getattr(hook, "offload", False) for part in model.modules() for hook in hooks_of(part))


def execution_device(*modules: nn.Module) -> torch.device:
    """Return the device of the first module that accelerate moves to one; else of the last module's weights.

    Offloaded weights are on the CPU or the meta device until a hook of accelerate loads them for a forward
    pass; such hooks may be on the innermost modules alone.
    """
    for module in (*modules, *modules[-1].modules()):
        for hook in hooks_of(module):
            if (place := getattr(hook, "execution_device", None)) is not None:
                return torch.device(place)
    return next(modules[-1].parameters()).device


def is_plain_linear(module: nn.Module | None) -> bool:
    """True for a plain layer x W^T + b with accessible weights.

    Layers that are quantised, adapted, offloaded or spread over devices have another type, hooks, or a
    `forward` of their own.
    """
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    hooked = module._forward_hooks or module._forward_pre_hooks or not computes_plainly(module)
    open_ = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and not weight.is_meta
    return open_ and not hooked and weight.shape == (module.out_features, module.in_features)


def stored_weight(model: nn.Module, name: str) -> Tensor:
    """Return a weight or buffer by its full name; offloaded ones are read from the CPU or the disk.

    The result is on the meta device if no hook has its content.
    """
    path, _, last = name.rpartition(".")
    weight: Tensor = getattr(model.get_submodule(path), last)
    if not weight.is_meta:
        return weight
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):  # a hook may manage the modules inside its own
        for hook in hooks_of(model.get_submodule(".".join(parts[:depth]))):
            try:
                stored: Tensor | None = (getattr(hook, "weights_map", None) or {})[".".join(parts[depth:])]
            except KeyError:
                continue
            if stored is not None:
                return stored
    return weight


def stored_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the names and parameters of a model, read by `stored_weight`."""
    for name, _ in model.named_parameters():
        yield name, stored_weight(model, name)


def is_finite(weight: Tensor) -> bool:
    """True unless a weight holds NaN or infinity; quantised ones are checked as far as torch reads them."""
    if weight.is_meta:
        return True
    if hasattr(weight, "__tensor_flatten__"):  # of torchao, or spread over devices: made of plain tensors
        inner, _ = weight.__tensor_flatten__()
        return all(is_finite(getattr(weight, name)) for name in inner)
    if not weight.is_floating_point():
        return True
    try:
        # torch has no isfinite for some one-byte formats
        readable = weight.to(torch.bfloat16) if weight.element_size() == 1 else weight
        return bool(readable.isfinite().all())
    except NotImplementedError:  # float4
        return True
