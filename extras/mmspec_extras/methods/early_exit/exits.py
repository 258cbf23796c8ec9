"""First layers of a decoder, run alone, with its own forward method, final norm and LM head."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from mmspec.models.replaced import Replacement, rebound, replaced_forwards, twin
from mmspec.open_types import AnyFunction
from mmspec.targets.mixers import find_mixers


def stack_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """Return the name and the list of a decoder's layers; an empty list if it has none."""
    for name in ("layers", "h"):
        stack = getattr(model.get_decoder(), name, None)
        if isinstance(stack, nn.ModuleList):
            return name, stack
    return "", nn.ModuleList()


def count_layers(model: PreTrainedModel) -> int:
    """Return the number of layers after which a decoder can exit; 0 if they are no list, or recurrent.

    A recurrent state covers only the committed tokens, so that a draft cannot continue from it.
    """
    most: int = model.config.get_text_config(decoder=True).num_hidden_layers
    return 0 if find_mixers(model) else min(most, len(stack_of(model)[1]))


def head_cost(model: PreTrainedModel) -> float:
    """Return the cost of a model's LM head in layers: its weights divided by those of a layer."""
    stack, head = stack_of(model)[1], model.get_output_embeddings()
    own = 0 if head is None else count_weights(head)
    return own * len(stack) / max(1, count_weights(stack))


def count_weights(module: nn.Module) -> int:
    """Return the number of weights of a module."""
    return sum(parameter.numel() for parameter in module.parameters())


def first_layers(
    model: PreTrainedModel, count: int, more: Sequence[Replacement] = ()
) -> AbstractContextManager[None]:
    """Return a context in which a model's decoder runs only its first layers, in this thread.

    The layers are the model's own, so that their hooks run, including those of accelerate.

    Args:
        model: model whose decoder has a list of layers.
        count: number of layers.
        more: further replacements in the context, such as of the `forward` of some layers.
    """
    decoder: Any = model.get_decoder()

    def cut(own: AnyFunction) -> AnyFunction:
        name, stack = stack_of(model)
        short = twin(decoder)
        short._modules[name] = stack[:count]
        return rebound(own, short)

    return replaced_forwards([Replacement(decoder, cut), *more])
