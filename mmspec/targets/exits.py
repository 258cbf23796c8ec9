"""First layers of a decoder, run alone: its own forward leaves early, through its final norm and LM head."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn
from transformers import PreTrainedModel

from mmspec.targets.mixers import find_mixers

__all__ = ["count_layers", "first_layers", "head_cost"]


def stack_of(model: PreTrainedModel) -> tuple[str, nn.ModuleList]:
    """The name and the list of the layers of a model's decoder; an empty list if it has none."""
    decoder = model.get_decoder()
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
    return 0 if find_mixers(model) else min(most, len(stack_of(model)[1]))


def head_cost(model: PreTrainedModel) -> float:
    """Cost of a model's LM head in layers: its weights over those of a layer."""
    stack, head = stack_of(model)[1], model.get_output_embeddings()
    own = 0 if head is None else count_weights(head)
    return own * len(stack) / max(1, count_weights(stack))


def count_weights(module: nn.Module) -> int:
    """Number of weights."""
    return sum(parameter.numel() for parameter in module.parameters())


@contextmanager
def first_layers(model: PreTrainedModel, count: int) -> Iterator[None]:
    """Let the forwards of a model run its first `count` layers alone, until the context is left."""
    decoder = model.get_decoder()
    name, stack = stack_of(model)
    # the list itself, so that hooks of the layers, of accelerate as well, run as they do
    setattr(decoder, name, stack[:count])
    try:
        yield
    finally:
        setattr(decoder, name, stack)
