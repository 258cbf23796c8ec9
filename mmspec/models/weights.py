"""Weights of a loaded model, wherever they lie: in memory, offloaded by accelerate, or quantised."""

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
    """The hooks of accelerate on a module, which bring its weights and inputs where it computes."""
    hook = getattr(module, "_hf_hook", None)
    return [] if hook is None else list(getattr(hook, "hooks", [hook]))


def is_offloaded(model: nn.Module) -> bool:
    """True if some weights of a model lie elsewhere than where it computes, and come for each forward."""
    return any(getattr(hook, "offload", False) for part in model.modules() for hook in hooks_of(part))


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


def is_plain_linear(module: nn.Module | None) -> bool:
    """True for a layer x W^T + b and nothing else, whose weights lie open.

    Quantised ones, those of an adapter, spread over devices or offloaded have other types, or hooks, or a
    forward of their own.
    """
    if type(module) is not nn.Linear:
        return False
    weight = module.weight
    hooked = module._forward_hooks or module._forward_pre_hooks or not computes_plainly(module)
    open_ = type(weight) in (Tensor, nn.Parameter) and weight.is_floating_point() and not weight.is_meta
    return open_ and not hooked and weight.shape == (module.out_features, module.in_features)


def stored_weight(model: nn.Module, name: str) -> Tensor:
    """A weight or buffer by its whole name, an offloaded one from the CPU or the disk.

    It is on the meta device where nothing says what is in it.
    """
    path, _, last = name.rpartition(".")
    weight: Tensor = getattr(model.get_submodule(path), last)
    if not weight.is_meta:
        return weight
    parts = name.split(".")
    for depth in range(len(parts) - 1, -1, -1):  # a hook may look after the modules inside its own
        for hook in hooks_of(model.get_submodule(".".join(parts[:depth]))):
            try:
                stored: Tensor | None = (getattr(hook, "weights_map", None) or {})[".".join(parts[depth:])]
            except KeyError:
                continue
            if stored is not None:
                return stored
    return weight


def stored_weights(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """The parameters of a model with their names, one after another, read as `stored_weight` does."""
    for name, _ in model.named_parameters():
        yield name, stored_weight(model, name)


def is_finite(weight: Tensor) -> bool:
    """True unless a weight holds NaN or infinity; quantised ones are looked into as far as torch can read."""
    if weight.is_meta:
        return True
    if hasattr(weight, "__tensor_flatten__"):  # of torchao, or spread over devices: made of plain tensors
        inner, _ = weight.__tensor_flatten__()
        return all(is_finite(getattr(weight, name)) for name in inner)
    if not weight.is_floating_point():
        return True
    try:
        # torch has no isfinite for some of the formats of one byte
        readable = weight.to(torch.bfloat16) if weight.element_size() == 1 else weight
        return bool(readable.isfinite().all())
    except NotImplementedError:  # float4
        return True
