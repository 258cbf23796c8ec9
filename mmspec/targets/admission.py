"""Checks whether a transformers model can be a target: its cache, masks and positions must be supported.

Any other model would not fail, but decode other tokens than `generate`. It is rejected when it is adapted,
before any forward pass, by its config and code and never by its name.
"""

from __future__ import annotations

import inspect
import math
import re
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn
from transformers import GenerationMixin, PreTrainedModel

from mmspec.core.cache import STATELESS_LAYERS, check_layer_types
from mmspec.core.recurrent import RECURRENT_LAYERS
from mmspec.errors import UnsupportedModelError
from mmspec.targets.mixers import find_mixers
from mmspec.targets.rotary import LONG_ONCE, change_of, find_changing
from mmspec.transformers_versions import cache_name, warn_of_untested

__all__ = ["check_length", "check_model", "check_reach", "decoder_of", "places_of", "takes"]

MASK_BACKENDS = ("sdpa", "eager")
# Names of cache arguments of `forward`; a second one is a cache of an unknown kind
IS_CACHE = re.compile(r"(?<!use_)cache$|past_key_values")
# Config fields: a bias that depends on cache positions (Falcon), and a selection of keys with ties by
# position (Doge)
BY_PLACE = ("alibi", "keep_window_size")
POSITIONS = "position_ids"
IS_TABLE = re.compile(r"position|^wpe$")  # names of tables of learned positions
MIDWAY = "original_max_position_embeddings"  # config field of models that restart their cache at this length
# Arguments of `get_rope_index` that M-RoPE positions depend on. With these, text advances all axes by 1.
ROPE_ARGUMENTS = {
    "input_ids",
    "mm_token_type_ids",
    "image_grid_thw",
    "video_grid_thw",
    "second_per_grid_ts",
    "second_per_grids",
    "audio_seqlens",
    "use_audio_in_video",
    "attention_mask",
    "kwargs",
}


def check_model(model: PreTrainedModel, rope_arguments: frozenset[str] = frozenset()) -> None:
    """Raise UnsupportedModelError unless a model supports rollback, tree masks and explicit positions.

    Args:
        model: a loaded model.
        rope_arguments: arguments of its positions that its target supports, besides grids.
    """
    warn_of_untested()
    text = model.config.get_text_config(decoder=True)
    attends = bool({*check_layer_types(text)} - RECURRENT_LAYERS - STATELESS_LAYERS)
    # a model that attends without positions has no depths of nodes
    crosses = bool(model.config.is_encoder_decoder)
    needed = ["position_ids"] * (attends and not crosses)
    rolls_back = find_mixers(model) and all(takes(model, argument) for argument in needed)
    if getattr(model, "_is_stateful", False) and not rolls_back:
        raise refusal(model, "keeps a recurrent state, which cannot drop rejected draft tokens")
    decoder = decoder_of(model)
    if not hasattr(decoder, "config"):
        raise refusal(model, f"has a {type(decoder).__name__} for its decoder, where its layers should be")
    backend = decoder.config._attn_implementation  # of the language model
    if backend not in MASK_BACKENDS:
        raise refusal(
            model,
            f"was loaded with attn_implementation={backend!r}, which cannot mask a draft tree; "
            f"load it with attn_implementation='sdpa'",
        )
    for name, module in decoder.named_modules():
        check_module(model, name, module, crosses)
    if crosses:
        check_positions(model, decoder)
    by_place = [name for name in BY_PLACE if getattr(text, name, None)]
    if by_place:
        raise refusal(model, f"attends by places in the cache, not by positions alone ({by_place[0]})")
    cache = cache_name(model.forward, decoder.forward)
    for argument in (*needed, cache):  # passed in every forward pass
        if not takes(model, argument):
            raise refusal(model, f"takes no `{argument}`, which draft trees need")
    own = inspect.signature(model.forward).parameters.get(cache)
    if own is not None and "dict" in str(own.annotation):  # XLM's `cache` is older than transformers' caches
        raise refusal(model, f"has its own kind of cache (`{cache}`: {own.annotation})")
    caches = [name for name in inspect.signature(model.forward).parameters if IS_CACHE.search(name)]
    if len(caches) > 1:
        raise refusal(model, f"has more than one cache ({', '.join(caches)})")
    check_rope_index(model, rope_arguments)
    change, kind = change_of(model.config)
    if change < math.inf and not find_changing(model):
        raise refusal(model, f"has rotary frequencies of type {kind!r}, which change in an unknown way")


def check_module(model: PreTrainedModel, name: str, module: nn.Module, crosses: bool) -> None:
    """Raise UnsupportedModelError if a module of the decoder attends or masks in an unknown way.

    Args:
        model: the model.
        name, module: of the module.
        crosses: whether the model is an encoder-decoder, whose decoder attends to the encoder's output.
    """
    place = name.rpartition(".")[2]
    label = (place + type(module).__name__).replace("_", "").lower()
    if not crosses and (place == "encoder_attn" or "crossatt" in label):
        raise refusal(model, "attends to inputs other than tokens of the prompt (cross-attention)")
    if "mergedattention" in label:
        raise refusal(model, "attends to tokens and to the encoder's output in one attention")
    if hasattr(module, "create_position_ids_from_input_ids"):
        raise refusal(model, "computes its positions from token ids, not from `position_ids`")
    for buffer in module.buffers(recurse=False):
        if buffer.dtype == torch.bool and buffer.dim() == 4 and buffer.shape[-1] == buffer.shape[-2]:
            raise refusal(model, "masks its attention by places in the cache, with its own mask")


def check_positions(model: PreTrainedModel, decoder: nn.Module) -> None:
    """Raise UnsupportedModelError if the positions of a decoder's tokens cannot be set for each node."""
    if any(hasattr(module, "relative_attention_bias") for module in decoder.modules()):
        raise refusal(model, "attends by relative positions of places in the cache (T5)")
    table = getattr(decoder, "embed_positions", None)
    sets_table = isinstance(table, nn.Embedding) and POSITIONS in inspect.signature(table.forward).parameters
    if POSITIONS not in inspect.signature(decoder.forward).parameters and not sets_table:
        raise refusal(model, "counts the positions of its decoder's tokens itself")


def decoder_of(model: PreTrainedModel) -> Any:
    """Return the stack of layers of a model's decoder."""
    decoder: Any = model.get_decoder()
    # the decoder of an encoder-decoder may be a language model of its own (VisionEncoderDecoderModel)
    while model.config.is_encoder_decoder and getattr(decoder, "get_decoder", None) is not None:
        inner = decoder.get_decoder()
        if inner is decoder:
            break
        decoder = inner
    return decoder


def places_of(model: PreTrainedModel) -> int | None:
    """Return the size of the table of a decoder's learned positions; None if it has none."""
    for name, module in decoder_of(model).named_modules():
        if isinstance(module, nn.Embedding) and IS_TABLE.search(name.rpartition(".")[2]):
            return module.num_embeddings - int(getattr(module, "offset", 0))
    return None


def check_rope_index(model: PreTrainedModel, more: frozenset[str]) -> None:
    """Raise UnsupportedModelError if positions depend on more than the grids of images and videos."""
    parts: list[object] = [model, getattr(model, "model", None)]
    rope_index = next((part.get_rope_index for part in parts if hasattr(part, "get_rope_index")), None)
    if rope_index is None:
        return
    unknown = sorted({*inspect.signature(rope_index).parameters} - ROPE_ARGUMENTS - more)
    if unknown:
        raise refusal(
            model, f"computes its positions from {', '.join(unknown)} too, which mmspec does not support yet"
        )


def check_reach(model: PreTrainedModel, prompts: Sequence[int], most: int) -> None:
    """Raise UnsupportedModelError for rows that can reach a length which the model cannot pass.

    That is the number of learned positions of an encoder-decoder, or the length at which a model restarts its
    cache. Phi-3 and similar models do so where their rotary frequencies change: their own
    `prepare_inputs_for_generation` drops the cache there. A length in their config distinguishes these
    models.

    Args:
        model: the target's.
        prompts: B numbers of tokens.
        most: largest number of new tokens; the last one is not processed.
    """
    change, kind = change_of(model.config)
    usual = GenerationMixin.prepare_inputs_for_generation
    own = getattr(type(model), usual.__name__, usual) is not usual
    places = places_of(model) if model.config.is_encoder_decoder else None
    if places is not None and max(prompts) + most - 1 > places:
        raise refusal(
            model,
            f"has {places} positions; a prompt of {max(prompts)} tokens and {most} new ones need more: lower "
            "max_new_tokens",
        )
    across = [length for length in prompts if length <= change < length + most - 1]
    if across and own and hasattr(model.config, MIDWAY):
        raise refusal(
            model,
            f"has rotary frequencies of type {kind!r} that change at {change} tokens, where it restarts its "
            f"cache; a prompt of {across[0]} tokens and {most} new ones may reach it: lower max_new_tokens",
        )


def check_length(model: PreTrainedModel, prompts: Sequence[int], draft: int) -> None:
    """Raise UnsupportedModelError for rows whose rotary frequencies would differ from those of rows alone.

    Args:
        model: the target's.
        prompts: R numbers of tokens.
        draft: number of tokens after each of them.
    """
    change, kind = change_of(model.config)
    longest = max(prompts) + draft
    if longest > change and not (kind == LONG_ONCE and min(prompts) > change):
        raise refusal(
            model,
            f"has rotary frequencies of type {kind!r}, which change at {change} tokens; a draft must end "
            f"before, and this one ends at {longest}",
        )


def takes(model: PreTrainedModel, argument: str) -> bool:
    """True if a model's `forward` takes an argument, or passes it on to a decoder that does."""
    outer = inspect.signature(model.forward).parameters
    hands_on = any(each.kind is inspect.Parameter.VAR_KEYWORD for each in outer.values())
    return argument in outer or (
        hands_on and argument in inspect.signature(model.get_decoder().forward).parameters
    )


def refusal(model: PreTrainedModel, reason: str) -> UnsupportedModelError:
    """Return the error for a model: its class name, followed by the reason."""
    return UnsupportedModelError(f"{type(model).__name__} {reason}")
