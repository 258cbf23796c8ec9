"""Prompts with only a part of their visual tokens, and the attention by which these are chosen.

A draft model that processes a tenth of a clip has a cheaper prefill and cheaper rounds; its target processes
the whole clip (SpecVLM, 2508.16201, section 3).
"""

from __future__ import annotations

import copy
import sys
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.core.draft import DraftKind, Tree
from mmspec.errors import UnsupportedModelError
from mmspec.models.replaced import Replacement, replaced_attention, replaced_forwards
from mmspec.open_types import AnyFunction, Keywords

__all__ = ["attention_behind", "guided_and_even", "reading_only"]

#: Arguments of decoders that hold all places, and the dimension of the places.
BY_PLACE = {"inputs_embeds": 1, "position_ids": -1, "visual_pos_masks": 1}
EAGER = "eager_attention_forward"


def guided_and_even(weights: Tensor, count: int, mass: float) -> Tensor:
    """Indices [count], ascending, of the tokens with the most attention, and of others, evenly spread.

    Args:
        weights: [N] attention to each token.
        count: number of tokens to keep, at most N.
        mass: share of all attention that the tokens with the most attention must cover; no further ones are
            chosen by attention.
    """
    order = weights.argsort(descending=True, stable=True)
    sorted_weights = weights[order]
    before = sorted_weights.cumsum(0) - sorted_weights
    guided = min(count, int((before < mass * sorted_weights.sum()).sum()))
    rest, left = order[guided:].sort().values, count - guided
    middle = torch.arange(left, dtype=torch.float32, device=rest.device) + 0.5
    even = (middle * len(rest) / max(1, left)).long()
    return torch.cat([order[:guided], rest[even]]).sort().values


def reading_only(decoder: nn.Module, places: Tensor | None) -> AbstractContextManager[None]:
    """Run a decoder on only some places [K] of its prompt, each at its own position; None for all.

    The replacement holds in this thread, until the context exits.

    Raises:
        UnsupportedModelError: the decoder gets more than embeddings and positions; raised in the forward
            pass.
    """
    if places is None:
        return nullcontext()

    def cut(own: AnyFunction) -> AnyFunction:
        return lambda *args, **given: own(*args, **thinned(given, places))

    return replaced_forwards([Replacement(decoder, cut)])


def thinned(given: Keywords, places: Tensor) -> Keywords:
    """Keyword arguments of a decoder, restricted to some places [K]."""
    embeddings, positions = given.get("inputs_embeds"), given.get("position_ids")
    if embeddings is None or positions is None:
        raise UnsupportedModelError(
            "the draft model passes no embeddings or no positions to its decoder, so it can only process "
            "whole prompts; leave out `keep`"
        )
    length = embeddings.shape[1]
    for name in given.keys() - BY_PLACE.keys():
        value = given[name]
        if isinstance(value, dict) or isinstance(value, Tensor) and length in value.shape:
            raise UnsupportedModelError(
                f"the draft model passes {name} of all tokens to its decoder, so it can only process whole "
                "prompts; leave out `keep`"
            )
    cut = {
        name: given[name].index_select(dim, places)
        for name, dim in BY_PLACE.items()
        if given.get(name) is not None
    }
    shown = given.get("visual_pos_masks")
    if shown is not None and given.get("deepstack_visual_embeds") is not None:
        kept = torch.zeros_like(shown)
        kept[:, places] = True
        rows = kept[shown]  # one for each visual token
        cut["deepstack_visual_embeds"] = [each[rows] for each in given["deepstack_visual_embeds"]]
    return given | cut


def attention_behind(target: Any, state: Any, tokens: Tensor) -> Tensor:
    """[R, T] attention of one token after each prompt to every cached place, averaged over layers and heads.

    Runs one forward pass of the target with eager attention, which is not committed.

    Args:
        target: a causal one.
        state: after the prefill, with R rows.
        tokens: [R, 1].

    Raises:
        UnsupportedModelError: no layer returns its attention weights.
    """
    reader = copy.copy(target)
    reader.steps = None
    reader._plain = False
    decoder = target.model.get_decoder()
    found: list[Tensor] = []

    def keeping(own: AnyFunction) -> AnyFunction:
        def forward(*args: object, **given: object) -> object:
            output = own(*args, **given)
            found.extend(each for each in output[1:2] if each is not None and each.dim() == 4)
            return output

        return forward

    attending = [each for each in decoder.modules() if "attention" in type(each).__name__.lower()]
    with replaced_attention(eagerly), replaced_forwards(Replacement(module, keeping) for module in attending):
        nodes = Tree.chain(tokens, DraftKind.POINT).nodes
        reader.score_nodes(replace(state, additive=decoder.dtype), nodes)
    if not found:
        name = type(target.model).__name__
        raise UnsupportedModelError(f"{name} returns no attention weights; leave out `keep`, or pass mass=0")
    return torch.stack([each[:, :, -1].float().mean(1) for each in found]).mean(0)


def eagerly(own: AnyFunction) -> AnyFunction:
    """The eager attention function of a module's modelling file, which returns its weights; else `own`."""

    def attention(module: nn.Module, *args: object, **given: object) -> object:
        files = (sys.modules[each.__module__] for each in type(module).__mro__)
        function = next((getattr(file, EAGER) for file in files if hasattr(file, EAGER)), own)
        return function(module, *args, **given)

    return attention
