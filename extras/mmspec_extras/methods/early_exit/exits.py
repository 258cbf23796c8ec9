"""First layers of a decoder, run alone, with its own forward method, final norm and LM head."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mmspec.models.replaced import Replacement, Switch, rebound, replaced_forwards, twin
from mmspec.targets.mixers import find_mixers

__all__ = ["FirstLayers", "count_layers", "head_cost"]


def stack_of(decoder: nn.Module) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a decoder's layers; an empty list if it has none."""
    for name in ("layers", "h"):
        stack = getattr(decoder, name, None)
        if isinstance(stack, nn.ModuleList):
            return name, stack
    return "", nn.ModuleList()


def count_layers(model: PreTrainedModel) -> int:
    """Return the number of layers after which a decoder can exit; 0 if they are no list, or recurrent.

    A recurrent state covers only the committed tokens, so that a draft cannot continue from it.
    """
    most: int = model.config.get_text_config(decoder=True).num_hidden_layers
    return 0 if find_mixers(model) else min(most, len(stack_of(model.get_decoder())[1]))


def head_cost(model: PreTrainedModel) -> float:
    """Return the cost of a model's LM head in layers: its weights divided by those of a layer."""
    stack, head = stack_of(model.get_decoder())[1], model.get_output_embeddings()
    own = 0 if head is None else count_weights(head)
    return own * len(stack) / max(1, count_weights(stack))


def count_weights(module: nn.Module) -> int:
    """Return the number of weights of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


class FirstLayers:
    """Makes contexts in which a model's decoder runs only its first layers.

    The layers are the model's own, so that their hooks run, including those of accelerate.

    Args:
        model: model whose decoder has a list of layers.
        count: number of layers.
    """

    def __init__(self, model: PreTrainedModel, count: int) -> None:
        self._decoder: nn.Module = model.get_decoder()
        self._count = count
        # the same objects in all forward passes, so that compiled code is used again
        self._short, self._first = twin(self._decoder), nn.ModuleList()
        self._switch = Switch(self._decoder, self._decoder.forward)
        self._forward: Callable[..., Any] | None = None

    @property
    def layers(self) -> Sequence[nn.Module]:
        return [*stack_of(self._decoder)[1]][: self._count]

    def __call__(self, more: Sequence[Replacement] = ()) -> AbstractContextManager[None]:
        """Return a context in which the decoder runs only its first layers, in this thread.

        Args:
            more: further replacements in the context, such as of the `forward` of some layers.
        """
        return replaced_forwards([Replacement(self._decoder, self._cut, self._switch), *more])

    def _cut(self, own: Callable[..., Any]) -> Callable[..., Any]:
        """Rebind the decoder's current forward method to a copy with only the first layers."""
        name, stack = stack_of(self._decoder)
        if [*self._first] != [*stack][: self._count]:
            self._first = stack[: self._count]
        parts = {**self._decoder._modules, name: self._first}
        vars(self._short).update(vars(self._decoder), _modules=parts)
        forward = rebound(own, self._short)
        if self._forward != forward:
            self._forward = forward
        return self._forward
