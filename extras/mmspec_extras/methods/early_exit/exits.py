"""First layers of a decoder, run alone: its own forward leaves early, through its final norm and LM head."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mmspec.models.replaced import Replacement, Switch, rebound, replaced_forwards, twin
from mmspec.targets.mixers import find_mixers

__all__ = ["FirstLayers", "count_layers", "head_cost"]


def stack_of(decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """The name and the list of the layers of a decoder; an empty list if it has none."""
    for name in ("layers", "h"):
        stack = getattr(decoder, name, None)
        if isinstance(stack, nn.ModuleList):
            return name, stack
    return "", nn.ModuleList()


def count_layers(model: PreTrainedModel) -> int:
    """Number of layers that a decoder can leave after; 0 for one whose layers are not a list, or recurrent.

    A recurrent state follows the committed tokens alone, so that a draft cannot go on from it.
    """
    most: int = model.config.get_text_config(decoder=True).num_hidden_layers
    return 0 if find_mixers(model) else min(most, len(stack_of(model.get_decoder())[1]))


def head_cost(model: PreTrainedModel) -> float:
    """Cost of a model's LM head in layers: its weights over those of a layer."""
    stack, head = stack_of(model.get_decoder())[1], model.get_output_embeddings()
    own = 0 if head is None else count_weights(head)
    return own * len(stack) / max(1, count_weights(stack))


def count_weights(module: nn.Module) -> int:
    """Number of weights."""
    return sum(parameter.numel() for parameter in module.parameters())


class FirstLayers:
    """The first layers of a model's decoder: its forward passes run those alone in a context of this.

    The layers themselves, so that hooks of them, of accelerate as well, run as they do.

    Args:
        model: whose decoder's layers are a list.
        count: how many.
    """

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        self._decoder: nn.Module = model.get_decoder()
        self._count = count
        # the same objects in all forward passes: what compiles one knows the next again
        self._short, self._first = twin(self._decoder), nn.ModuleList()
        self._switch = Switch(self._decoder, self._decoder.forward)
        self._forward: Callable[..., Any] | None = None

    def __call__(self) -> AbstractContextManager[None]:
        """Let the decoder run its first layers alone in this thread, until the context is left."""
        return replaced_forwards([Replacement(self._decoder, self._cut, self._switch)])

    def _cut(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Make the forward pass of the decoder, as it is now, that of its first layers."""
        name, stack = stack_of(self._decoder)
        if [*self._first] != [*stack][: self._count]:
            self._first = stack[: self._count]
        parts = {**self._decoder._modules, name: self._first}
        vars(self._short).update(vars(self._decoder), _modules=parts)
        forward = rebound(own, self._short)
        if self._forward != forward:
            self._forward = forward
        return self._forward
