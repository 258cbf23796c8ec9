"""Admission of transformers models as targets: their cache, masks and positions have to be understood here.

Any other would not fail but decode other words than `generate`. It is refused when it is adapted, before any
work, by what it says of itself and never by its name.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from mmspec.core.cache import STATELESS_LAYERS, check_layer_types
from mmspec.core.recurrent import RECURRENT_LAYERS
from mmspec.errors import UnsupportedModelError
from mmspec.targets.mixers import find_mixers
from mmspec.targets.rotary import LONG_ONCE, change_of, find_changing
from mmspec.transformers_versions import cache_name, warn_of_untested

__all__ = ["check_length", "check_model", "check_reach", "takes"]

MASK_BACKENDS = ("sdpa", "eager")
# Arguments of forwards by name; a second one is a cache that nobody here knows of
IS_CACHE = re.compile(r"(?<!use_)cache$|past_key_values")
# Of configs: a bias on the place of a key (Falcon), and the choice of some keys, ties by their places (Doge)
BY_PLACE = ("alibi", "keep_window_size")
MIDWAY = "original_max_position_embeddings"  # of configs of models that read their text again there
# Of `get_rope_index`: what M-RoPE positions are made of. With these, text goes on by 1 on all axes.
ROPE_ARGUMENTS = {
    "input_ids",
    "mm_token_type_ids",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "attention_mask",
    "kwargs",
}


def check_model(model: PreTrainedModel, rope_arguments: frozenset[str] = frozenset()) -> None:
    """Raise UnsupportedModelError unless a model can go back on tokens, see trees and be told positions.

    Args:
        model: a loaded model.
        rope_arguments: what its target knows of that positions are made of, besides grids.
    """
    warn_of_untested()
    if model.config.is_encoder_decoder:
        raise refusal(model, "is an encoder-decoder; only decoder-only models are supported")
    text = model.config.get_text_config(decoder=True)
    attends = bool({*check_layer_types(text)} - RECURRENT_LAYERS - STATELESS_LAYERS)
    # a model that attends without positions could not tell the depths of nodes either
    needed = ["position_ids"] * attends
    taken_back = find_mixers(model) and all(takes(model, argument) for argument in needed)
    if getattr(model, "_is_stateful", False) and not taken_back:
        raise refusal(model, "keeps a recurrent state, from which rejected draft tokens cannot be taken back")
    decoder = model.get_decoder()
    if not hasattr(decoder, "config"):
        raise refusal(model, f"has a {type(decoder).__name__} for its decoder, where the layers should be")
    backend = decoder.config._attn_implementation  # of the language model
    if backend not in MASK_BACKENDS:
        raise refusal(
            model,
            f"was loaded with attn_implementation={backend!r}, which cannot mask a draft tree; "
            f"load it with attn_implementation='sdpa'",
        )
    for name, module in decoder.named_modules():
        check_module(model, name, module)
    by_place = [name for name in BY_PLACE if getattr(text, name, None)]
    if by_place:
        raise refusal(model, f"attends by places in the cache, not by positions alone ({by_place[0]})")
    told = cache_name(model.forward, decoder.forward)
    for argument in (*needed, told):  # passed with every forward
        if not takes(model, argument):
            raise refusal(model, f"takes no `{argument}`, so nodes of a tree cannot be put in their places")
    own = inspect.signature(model.forward).parameters.get(told)
    if own is not None and "dict" in str(own.annotation):  # XLM had a `cache` before the others
        raise refusal(model, f"keeps a cache of a kind of its own (`{told}`: {own.annotation})")
    caches = [name for name in inspect.signature(model.forward).parameters if IS_CACHE.search(name)]
    if len(caches) > 1:
        raise refusal(model, f"keeps more than one cache ({', '.join(caches)})")
    check_rope_index(model, rope_arguments)
    change, kind = change_of(model.config)
    if change < math.inf and not find_changing(model):
        raise refusal(model, f"has rotary frequencies of type {kind!r}, which change in a way of its own")


def check_module(model: PreTrainedModel, name: str, module: nn.Module) -> None:
    """Raise UnsupportedModelError if a part of the decoder attends, masks or counts in a way of its own."""
    place = name.rpartition(".")[2]
    label = (place + type(module).__name__).replace("_", "").lower()
    if place == "encoder_attn" or "crossatt" in label:
        raise refusal(model, "attends to what is no token of the prompt (cross-attention)")
    if hasattr(module, "create_position_ids_from_input_ids"):
        raise refusal(model, "counts its positions from token ids, not by `position_ids`")
    for buffer in module.buffers(recurse=False):
        if buffer.dtype == torch.bool and buffer.dim() == 4 and buffer.shape[-1] == buffer.shape[-2]:
            raise refusal(model, "masks its attention by places in the cache, with a mask of its own")


def check_rope_index(model: PreTrainedModel, more: frozenset[str]) -> None:
    """Raise UnsupportedModelError if positions are made of more than the grids of images and videos."""
    parts: list[object] = [model, getattr(model, "model", None)]
    rope_index = next((part.get_rope_index for part in parts if hasattr(part, "get_rope_index")), None)
    if rope_index is None:
        return
    unknown = sorted({*inspect.signature(rope_index).parameters} - ROPE_ARGUMENTS - more)
    if unknown:
        made_of = ", ".join(unknown)
        raise refusal(model, f"counts its positions by {made_of} too, and has no target yet that knows how")


def check_reach(model: PreTrainedModel, prompts: Sequence[int], most: int) -> None:
    """Raise UnsupportedModelError for rows on whose way a model reads all of its text again.

    Phi-3 and models like it do so where their rotary frequencies change: their own preparation of inputs
    drops the cache there. It looks at a length in their config, which tells these models from others.

    Args:
        model: the target's.
        prompts: B numbers of tokens.
        most: number of tokens that may follow them; the last is not read.
    """
    change, kind = change_of(model.config)
    usual = GenerationMixin.prepare_inputs_for_generation
    own = getattr(type(model), usual.__name__, usual) is not usual
    across = [length for length in prompts if length <= change < length + most - 1]
    if across and own and hasattr(model.config, MIDWAY):
        raise refusal(
            model,
            f"has rotary frequencies of type {kind!r} that change at {change} tokens, where it reads all "
            f"again; a prompt of {across[0]} tokens and {most} new ones may go across: ask for fewer",
        )


def check_length(model: PreTrainedModel, prompts: Sequence[int], draft: int) -> None:
    """Raise UnsupportedModelError for rows whose tokens one forward would turn otherwise than alone.

    Args:
        model: the target's.
        prompts: R numbers of tokens.
        draft: number of tokens behind each of them.
    """
    change, kind = change_of(model.config)
    longest = max(prompts) + draft
    if longest > change and not (kind == LONG_ONCE and min(prompts) > change):
        raise refusal(
            model,
            f"has rotary frequencies of type {kind!r}, which change at {change} tokens; a draft must not "
            f"reach beyond them, and this one reaches to {longest}",
        )


def takes(model: PreTrainedModel, argument: str) -> bool:
    """True if a model's forward takes an argument, or hands it to a decoder that does."""
    outer = inspect.signature(model.forward).parameters
    hands_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in outer.values())
    return argument in outer or (
        hands_on and argument in inspect.signature(model.get_decoder().forward).parameters
    )


def refusal(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    """The error that names a model and says what is wrong with it."""
    return UnsupportedModelError(f"{type(model).__name__} {reason}")
