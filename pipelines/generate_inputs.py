"""Inputs that the caller of `generate` gave: each acts in the accelerated loop, or is refused by name.

Allowed is what says nothing new (an empty cache, positions that follow from the mask) and what is read with
the prompt alone. All else counts in every forward of `generate`, and ours could not know how.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.decoding.cache import check_layer_types
from mmspec.errors import InputError
from mmspec.pipelines.generate_rows import (
    CACHES,
    CHOICES,
    M_ROPE_DIMENSIONS,
    OF_GENERATE,
    OF_PROMPT,
    TOKEN_TYPES,
    is_empty,
)

__all__ = ["check_inputs"]

PREPARE = "prepare_inputs_for_generation"
M_ROPE_AXES = 3
#: Keywords of the hooks by which PEFT gives each row of a batch an adapter, or a place to begin at.
OF_ROWS = {"adapter_names", "alora_offsets"}


def check_inputs(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any], given: Mapping[str, Any]
) -> None:
    """Raise InputError for the first input that would act in `generate`, and not in the accelerated loop.

    Args:
        model: the target's.
        input_ids: [B, L].
        model_kwargs: what `generate` hands to its loop.
        given: the keywords of the caller.
    """
    if model_kwargs.get("inputs_embeds") is not None:
        raise InputError("inputs_embeds", model_kwargs["inputs_embeds"], "None: prompts are `input_ids`")
    check_cache(model_kwargs)
    seen = check_mask(model, input_ids, model_kwargs.get("attention_mask"))
    check_positions(model, seen, model_kwargs, given.get("position_ids") is not None)
    check_names(model, model_kwargs)
    check_preparation(model, input_ids, model_kwargs)
    check_hooks(model)


def check_cache(model_kwargs: Mapping[str, Any]) -> None:
    """Raise InputError for a cache of the caller's: it would neither be seen nor filled."""
    for name in CACHES:
        cache = model_kwargs.get(name)
        if cache is None:
            continue
        length = int(cache.get_seq_length()) if hasattr(cache, "get_seq_length") else None
        if length != 0 or getattr(cache, "_is_user_defined", False):
            held = type(cache).__name__ if length is None else f"{type(cache).__name__} of {length} tokens"
            raise InputError(name, held, "None: an accelerated call keeps a cache of its own")


def check_mask(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Which tokens of the prompts are read, [B, L].

    Raises:
        InputError: the mask is of other tokens, weighs them, hides the last one, or has holes that would be
            seen by layers which count places.
    """
    if mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if mask.shape != input_ids.shape:
        allowed = f"one value for each token of the prompts, {list(input_ids.shape)}"
        raise InputError("attention_mask", list(mask.shape), allowed)
    seen = mask != 0
    if not torch.equal(seen.to(mask.dtype), mask):
        raise InputError("attention_mask", mask.unique().tolist(), "zeros and ones")
    if not bool(seen[:, -1].all()):
        rows = (~seen[:, -1]).nonzero().flatten().tolist()
        raise InputError("attention_mask", f"rows {rows} that end in padding", "prompts padded on the left")
    is_padding_alone = bool((seen[:, 1:] >= seen[:, :-1]).all())
    kinds = set(check_layer_types(model.config.get_text_config(decoder=True)))
    if not is_padding_alone and kinds != {"full_attention"}:
        counting = ", ".join(sorted(kinds - {"full_attention"}))
        allowed = f"zeros in front of a prompt alone: layers of type {counting} count what is hidden"
        raise InputError("attention_mask", "hidden tokens inside of a prompt", allowed)
    return seen


def check_positions(
    model: PreTrainedModel, seen: Tensor, model_kwargs: Mapping[str, Any], is_given: bool
) -> None:
    """Raise InputError for positions that do not follow from the mask, or (M-RoPE) do not simply go on."""
    positions, order = model_kwargs.get("position_ids"), model_kwargs.get("cache_position")
    if order is not None and order.tolist() != list(range(seen.shape[1])):
        raise InputError("cache_position", order.tolist(), "None: an accelerated call keeps its own")
    if positions is None:
        return
    hidden = ~seen.to(positions.device)
    implied = (seen.long().cumsum(-1) - 1).to(positions.device)
    if positions.dim() == M_ROPE_DIMENSIONS:
        texts, axes = positions[:-M_ROPE_AXES], positions[-M_ROPE_AXES:]
        follows = positions.shape[1:] == seen.shape and bool(((texts == implied) | hidden).all())
        greatest = axes.amax(0).masked_fill(hidden, 0).amax(-1)
        follows = follows and bool((axes[..., -1] == greatest).all())
        allowed = "positions whose last is the greatest on all axes, so that the next is one more"
    else:
        # a model with several axes makes positions of all of them: fewer are the caller's
        inner: Any = getattr(model, "model", None)
        fewer = is_given and any(hasattr(part, "get_rope_index") for part in (model, inner))
        follows = not fewer and positions.shape[-1] == seen.shape[-1]
        follows = follows and bool(((positions == implied) | hidden).all())
        allowed = "None, or those that follow from `attention_mask`: others are not continued yet"
    if not follows:
        raise InputError("position_ids", positions.flatten().tolist(), allowed)


def check_names(model: PreTrainedModel, model_kwargs: Mapping[str, Any]) -> None:
    """Raise InputError for an input that is neither of the prompt nor the default of the forward."""
    has_images = hasattr(getattr(model, "model", None), "get_image_features")
    known = OF_GENERATE | OF_PROMPT | CHOICES | ({TOKEN_TYPES} if has_images else set())
    usual = inspect.signature(model.forward).parameters
    for name, value in model_kwargs.items():
        says_nothing = is_empty(value) or (name in usual and is_same(usual[name].default, value))
        if name not in known and not says_nothing:
            allowed = "nothing: an accelerated call would not give it to every forward, as `generate` does"
            raise InputError(name, value, allowed)
    keep = model_kwargs.get("logits_to_keep")
    if not (keep is None or isinstance(keep, int)):
        raise InputError("logits_to_keep", keep, "a number: an accelerated call keeps the last logits")


def is_same(default: object, value: object) -> bool:
    """True for a plain value that is the default."""
    return isinstance(value, bool | int | float | str) and type(value) is type(default) and value == default


def check_preparation(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> None:
    """Raise InputError where the forwards of `generate` get other inputs than those that are known here.

    PEFT brings prompts and prefixes in so, by a method of the instance. What a class outside of transformers
    does is seen by asking for the inputs of the first forward.
    """
    family: Any = type(model)
    usual, prepare = getattr(family, PREPARE), getattr(model, PREPARE)
    if getattr(prepare, "__func__", None) is not usual or prepare.__self__ is not model:
        allowed = (
            "that of the model's class: prompts or prefixes that this one brings in (PEFT) would be lost"
        )
        raise InputError(PREPARE, getattr(prepare, "__qualname__", type(prepare).__name__), allowed)
    if usual.__module__.partition(".")[0] == "transformers":
        return
    known = {"input_ids": input_ids, **model_kwargs}
    prepared = prepare(input_ids, is_first_iteration=True, **model_kwargs)
    for name, value in prepared.items():
        before = known.get(name)
        alike = value is before or is_empty(value)
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            alike = torch.equal(value, before)
        if not alike and name != "cache_position":  # code of others is still given that
            raise InputError(PREPARE, family.__qualname__, f"one that leaves `{name}` as it is")


def check_hooks(model: PreTrainedModel) -> None:
    """Raise InputError where hooks tell layers what is meant for each row of the caller's batch."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            names = OF_ROWS & set(hook.keywords) if isinstance(hook, functools.partial) else set()
            if names:
                raise InputError(min(names), type(module).__name__, "None: rows are read one at a time")
