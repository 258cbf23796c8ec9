"""What targets that run a model of torch share: how its linear layers are computed on a CPU."""

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
        compared: accelerators that `mmspec bench` compares where none are named, the first of which
            `mmspec check` takes; () for those of the command.
        fills_masks: whether open places hold a mask token, and a forward predicts any of them.
        is_controlled: whether an image controls what is drawn.
    """

    model: Any
    compared: Sequence[str] = ()
    fills_masks: bool = False
    is_controlled: bool = False

    @property
    def packing(self) -> Packing:
        """How much memory packed weights of the model may take, on a CPU."""
        return packing_of(self.model)

    def computing(self, *modules: nn.Module) -> Callable[[], AbstractContextManager[None]]:
        """See `Target.computing`: on a CPU, linear layers are computed in the fastest way."""
        if self.device.type != "cpu":
            return nullcontext
        return LinearLayers((self.model, *modules), self.packing)


#: A target that runs a model, whose kind of state does not matter.
AnyModelTarget: TypeAlias = ModelTarget[Any]
