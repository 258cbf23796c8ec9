"""Replacing the forward of a module of transformers, for the time of one scoring forward."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["replaced_forward"]


@contextmanager
def replaced_forward(
    module: nn.Module, replacement: Callable[[Callable[..., Any]], Callable[..., Any]]
) -> Iterator[None]:
    """Let a module compute something else, until the context is left.

    Args:
        module: of a target.
        replacement: makes the other forward of the module's own.
    """
    # accelerate's hooks (device_map, offloading) stand at `forward`, and call the module's own by this name
    name = "_old_forward" if hasattr(module, "_hf_hook") else "forward"
    kept = vars(module).get(name)
    setattr(module, name, replacement(getattr(module, name)))
    try:
        yield
    finally:
        if kept is None:
            delattr(module, name)
        else:
            setattr(module, name, kept)
