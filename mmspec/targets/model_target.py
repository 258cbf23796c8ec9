"""Base of targets that run a torch model, with fast linear layers on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeAlias

from torch import nn

from mmspec.core.interfaces import State, Target
from mmspec.models.linear_layers import LinearLayers, Packing, packing_of

__all__ = ["AnyModelTarget", "ModelTarget"]


class ModelTarget(Target[State]):
    """Base of targets that run a model.

    Attributes:
        model: the loaded model.
        compared: default accelerators of `mmspec bench`, of which `mmspec check` uses the first; () for the
            command's own defaults.
        fills_masks: whether open places hold a mask token, and a forward pass can predict any of them.
        is_controlled: whether an image controls the generated image.
    """

    model: Any
    compared: Sequence[str] = ()
    fills_masks: bool = False
    is_controlled: bool = False

    @property
    def packing(self) -> Packing:
        """Memory that packed weights of the model may take on a CPU."""
        return packing_of(self.model)

    def computing(self, *modules: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """See `Target.computing`; on a CPU, linear layers use their fastest implementation."""
        if self.device.type != "cpu":
            return nullcontext
        return LinearLayers((self.model, *modules), self.packing)


#: A target that runs a model, with any kind of state.
AnyModelTarget: TypeAlias = ModelTarget[Any]
