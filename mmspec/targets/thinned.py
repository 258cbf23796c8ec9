"""Prompts of which a model reads some visual tokens alone, and the attention by which those are chosen.

A draft model that reads a tenth of a clip costs less to start and to run; its target reads all of it
(SpecVLM, 2508.16201, section 3).
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from mmspec.decoding.draft import DraftKind, Tree
from mmspec.errors import UnsupportedModelError

__all__ = ["attention_behind", "guided_and_even", "reading_only"]

#: Arguments of decoders that are of all places, and which of their dimensions is.
BY_PLACE = {"inputs_embeds": 1, "position_ids": -1, "visual_pos_masks": 1}


def guided_and_even(weights: Tensor, count: int, mass: float) -> Tensor:
    """Indices [count], ascending, of the tokens that attention asks for, and of others, evenly spread.

    Args:
        weights: [N] attention to each token.
        count: how many are kept, at most N.
        mass: share of all attention that those of most attention make up together; no more than are needed.
    """
    order = weights.argsort(descending=True, stable=True)
    sorted_weights = weights[order]
    before = sorted_weights.cumsum(0) - sorted_weights
    guided = min(count, int((before < mass * sorted_weights.sum()).sum()))
    rest, left = order[guided:].sort().values, count - guided
    middle = torch.arange(left, dtype=torch.float32, device=rest.device) + 0.5
    even = (middle * len(rest) / max(1, left)).long()
    return torch.cat([order[:guided], rest[even]]).sort().values


@contextmanager
def reading_only(decoder: nn.Module, places: Tensor | None) -> Iterator[None]:
    """Let a decoder read some places [K] of its prompt alone, each at its own position; None for all.

    Raises:
        UnsupportedModelError: the model gives its decoder more than embeddings and positions; in the forward.
    """
    if places is None:
        yield
        return

    def cut(_: nn.Module, args: Any, given: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
        return args, thinned(given, places)

    handle = decoder.register_forward_pre_hook(cut, with_kwargs=True)
    try:
        yield
    finally:
        handle.remove()


def thinned(given: dict[str, Any], places: Tensor) -> dict[str, Any]:
    """Keyword arguments of a decoder, cut to some places [K]."""
    embeddings, positions = given.get("inputs_embeds"), given.get("position_ids")
    if embeddings is None or positions is None:
        raise UnsupportedModelError(
            "its decoder is given no embeddings or no positions; it reads whole prompts"
        )
    length = embeddings.shape[1]
    for name in given.keys() - BY_PLACE.keys():
        value = given[name]
        if isinstance(value, dict) or isinstance(value, Tensor) and length in value.shape:
            raise UnsupportedModelError(f"its decoder is given {name} of all places; it reads whole prompts")
    cut = {
        name: given[name].index_select(dim, places)
        for name, dim in BY_PLACE.items()
        if given.get(name) is not None
    }
    shown = given.get("visual_pos_masks")
    if shown is not None and given.get("deepstack_visual_embeds") is not None:
        kept = torch.zeros_like(shown)
        kept[:, places] = True
        rows = kept[shown]  # of the visual tokens, one after the other
        cut["deepstack_visual_embeds"] = [each[rows] for each in given["deepstack_visual_embeds"]]
    return given | cut


def attention_behind(target: Any, state: Any, tokens: Tensor) -> Tensor:
    """[R, T] attention of one token behind each prompt to every cached place, the mean of layers and heads.

    One forward of the target with eager attention, of which nothing is kept.

    Args:
        target: a causal one.
        state: after the prefill; R rows.
        tokens: [R, 1].

    Raises:
        UnsupportedModelError: no layer tells its attention.
    """
    reader = copy.copy(target)
    reader.steps = None
    decoder = target.model.get_decoder()
    found: list[Tensor] = []

    def keep(_: nn.Module, __: object, output: Any) -> None:
        found.extend(each for each in output[1:2] if each is not None and each.dim() == 4)

    attending = [each for each in decoder.modules() if "attention" in type(each).__name__.lower()]
    handles = [module.register_forward_hook(keep) for module in attending]
    chosen = decoder.config._attn_implementation
    decoder.config._attn_implementation = {"": "eager"}
    try:
        nodes = Tree.chain(tokens, DraftKind.POINT).nodes
        reader.score_nodes(replace(state, additive=decoder.dtype), nodes)
    finally:
        decoder.config._attn_implementation = {"": chosen}
        for handle in handles:
            handle.remove()
    if not found:
        raise UnsupportedModelError(f"{type(target.model).__name__} does not tell what it attends to")
    return torch.stack([each[:, :, -1].float().mean(1) for each in found]).mean(0)
