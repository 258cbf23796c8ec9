"""Inputs that the caller of transformers' `generate` gave: checked, and split into one request for each row.

Allowed is what says nothing new (an empty cache, positions that follow from the mask) and what is read with
the prompt alone. All else counts in every forward of `generate`, and is refused by name.
"""

from __future__ import annotations

import copy
import functools
import inspect
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import Cache, PreTrainedConfig, PreTrainedModel
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from mmspec.core.cache import check_layer_types
from mmspec.core.interfaces import Request
from mmspec.errors import InputError
from mmspec.open_types import Inputs, Keywords
from mmspec.transformers_versions import CACHE_NAMES

__all__ = ["PATCHES", "check_inputs", "check_mask", "split_rows"]

PREPARE = "prepare_inputs_for_generation"
M_ROPE_AXES = 3
#: Keywords of the hooks by which PEFT gives each row of a batch an adapter, or a place to begin at.
OF_ROWS = {"adapter_names", "alora_offsets"}
#: What generate prepares for its own loop; dropped, once `check_inputs` finds nothing new in it.
OF_GENERATE = {
    *CACHE_NAMES,
    "attention_mask",
    "position_ids",
    "cache_position",
    "use_cache",
    "logits_to_keep",
}
#: What is read with the prompt and never again: images, sounds, where they stand, and how they are read.
OF_PROMPT = {
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, "mm_encoder_outputs",
    "mm_token_type_ids", "moe_mm_token_type_ids", "image_grid_thw", "video_grid_thw", "image_grid_hw",
    "second_per_grid_ts", "video_second_per_grid", "image_position_ids", "video_position_ids",
    "num_frames_per_video", "image_num_crops", "batch_num_images", "images_per_sample", "image_merge_sizes",
    "video_merge_sizes", "video_compression_mask", "spatial_shapes", "target_sizes", "target_sizes_videos",
    "tile_fine_mask", "image_pixel_values", "image_attention_mask", "feature_attention_mask",
    "audio_feature_lengths", "audio_input_features", "audio_embed_sizes", "audio_attention_mask",
}  # fmt: skip
#: How images are read: one value for all rows.
CHOICES = {
    "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "downsample_mode",
    "interpolate_pos_encoding", "use_audio_in_video",
}  # fmt: skip
TOKEN_TYPES = "token_type_ids"
M_ROPE_DIMENSIONS = 3
#: Images as they are, [N, n, d], with the places [N, n, 2] of their patches.
PATCHES = ("pixel_values", "image_position_ids")
ENCODED, GRIDS, COUNTS = "mm_encoder_outputs", "image_grid_thw", "images_per_sample"
#: Attributes of configs that name the token which each kind of encoded input stands at.
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
}


def check_inputs(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: Inputs, given: Mapping[str, object]
) -> None:
    """Raise InputError for the first input that would act in `generate`, and not in the accelerated loop.

    Args:
        model, input_ids, model_kwargs: as `generate` hands them to its loop.
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


def check_cache(model_kwargs: Inputs) -> None:
    """Raise InputError for a cache of the caller's: it would neither be seen nor filled."""
    for name in CACHE_NAMES:
        cache = model_kwargs.get(name)
        if cache is None:
            continue
        length = cached_tokens(cache)
        if length != 0 or getattr(cache, "_is_user_defined", False):
            held = type(cache).__name__ if length is None else f"{type(cache).__name__} of {length} tokens"
            raise InputError(name, held, "None: an accelerated call keeps a cache of its own")


def cached_tokens(cache: Cache) -> int | None:
    """Number of tokens that a cache has read; None if it does not tell."""
    if not hasattr(cache, "get_seq_length"):
        return None
    try:
        return int(cache.get_seq_length())
    except ValueError:  # recurrent layers alone count no tokens
        return None if cache.has_previous_state() else 0


def check_mask(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Check the mask of the prompts; return the tokens that are read, [B, L] of booleans.

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


def check_positions(model: PreTrainedModel, seen: Tensor, model_kwargs: Inputs, is_given: bool) -> None:
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
        inner = getattr(model, "model", None)
        fewer = is_given and any(hasattr(part, "get_rope_index") for part in (model, inner))
        follows = not fewer and positions.shape[-1] == seen.shape[-1]
        follows = follows and bool(((positions == implied) | hidden).all())
        allowed = "None, or those that follow from `attention_mask`: others are not continued yet"
    if not follows:
        raise InputError("position_ids", positions.flatten().tolist(), allowed)


def check_names(model: PreTrainedModel, model_kwargs: Inputs) -> None:
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


def check_preparation(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Inputs) -> None:
    """Raise InputError where the forwards of `generate` get other inputs than those that are known here.

    PEFT brings prompts and prefixes in so, by a method of the instance. What a class outside of transformers
    does is seen by asking for the inputs of the first forward.
    """
    family = type(model)
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


def split_rows(
    config: PreTrainedConfig,
    input_ids: Tensor,
    model_kwargs: Inputs,
    image_sizes: Sequence[int] | None = None,
) -> list[Request]:
    """Split a padded batch into one request per row, without its padding.

    Images go to the rows in whose placeholders they belong.

    Args:
        config: of the model, which names the placeholders.
        input_ids: [B, L], padded on the left.
        model_kwargs: what `generate` hands to its loop, and `check_inputs` has found to be of the prompt.
        image_sizes: tokens of each image in `PATCHES`; None if there are none, or `generate` encodes them.

    Raises:
        InputError: several rows with inputs that cannot be told apart.
    """
    known = OF_PROMPT | CHOICES | {TOKEN_TYPES}
    inputs = {name: value for name, value in model_kwargs.items() if name in known and not is_empty(value)}
    mask = model_kwargs.get("attention_mask")
    seen = torch.ones_like(input_ids, dtype=torch.bool) if mask is None else mask.bool()
    aligned = {
        name: value for name, value in inputs.items() if getattr(value, "shape", None) == input_ids.shape
    }
    shared = {name: value for name, value in inputs.items() if name not in aligned}
    rows = [range(0)] * len(input_ids)
    images: dict[str, Tensor] = {}
    if image_sizes is not None:
        rows = shares(config, "image", input_ids, image_sizes)
        images = {name: shared.pop(name) for name in PATCHES if name in shared}
    positions = model_kwargs.get("position_ids")
    requests = []
    for row, own in enumerate(rows_of(config, input_ids, shared)):
        kept = seen[row]
        if chosen := rows[row]:
            own |= {name: value[chosen.start : chosen.stop] for name, value in images.items()}
        if positions is not None and positions.dim() == M_ROPE_DIMENSIONS:
            # the grids they were made from may be gone by now
            own["position_ids"] = positions[:, row : row + 1, kept]
        per_token = {name: value[row : row + 1, kept] for name, value in aligned.items()}
        requests.append(Request({"input_ids": input_ids[row : row + 1, kept], **own, **per_token}))
    return requests


def is_empty(value: object) -> bool:
    """True for what says nothing: None, False and an empty dictionary."""
    return value is None or value is False or (isinstance(value, dict) and not value)


def rows_of(config: PreTrainedConfig, input_ids: Tensor, shared: Inputs) -> list[Keywords]:
    """Inputs that are not one value a token, row by row.

    Raises:
        InputError: several rows share one that is not encoded images, or grids with their number in each row.
    """
    count = len(input_ids)
    if count == 1:
        return [dict(shared)]
    rows: list[Keywords] = [
        {name: value for name, value in shared.items() if name in CHOICES} for _ in range(count)
    ]
    unknown = set(shared) - {ENCODED} - CHOICES - ({GRIDS, COUNTS} if COUNTS in shared else set())
    if unknown:
        allowed = "one row at a time; of several, only images that transformers 5.23 encodes are told apart"
        raise InputError("inputs", sorted(unknown), allowed)
    if COUNTS in shared:
        sizes = shared[COUNTS].tolist()
        for row, grids in zip(rows, shared[GRIDS].split(sizes), strict=True):
            row |= {GRIDS: grids, COUNTS: torch.tensor([len(grids)], device=grids.device)}
    for kind, output in shared.get(ENCODED, {}).items():
        parts = list(output.pooler_output)
        for row, chosen in zip(
            rows, shares(config, kind, input_ids, [len(part) for part in parts]), strict=True
        ):
            if chosen:
                row.setdefault(ENCODED, {})[kind] = chosen_of(output, chosen)
    return rows


def shares(config: PreTrainedConfig, kind: str, input_ids: Tensor, sizes: Sequence[int]) -> list[range]:
    """Share out encoded images, of so many tokens each, among the rows [B, L] in their order.

    Raises:
        InputError: the placeholders in the rows are not as many as the images' tokens.
    """
    names = PLACEHOLDERS.get(kind, ())
    token = next((value for name in names if (value := getattr(config, name, None)) is not None), None)
    places = [] if token is None else (input_ids == token).sum(-1).tolist()
    found, first = [], 0
    for wanted in places:
        last, filled = first, 0
        while last < len(sizes) and filled < wanted:
            filled, last = filled + sizes[last], last + 1
        if filled != wanted:
            break
        found.append(range(first, last))
        first = last
    if len(found) != len(input_ids) or first != len(sizes):
        allowed = f"rows whose placeholders are as many as the tokens of their images, {list(sizes)}"
        raise InputError("inputs", {f"{kind} placeholders": places}, allowed)
    return found


def chosen_of(output: Any, chosen: range) -> Any:
    """The part of an encoder's output that belongs to some of the images."""
    own, part = copy.copy(output), slice(chosen.start, chosen.stop)
    own.pooler_output = output.pooler_output[part]
    if (levels := getattr(output, "deepstack_features", None)) is not None:
        own.deepstack_features = [level[part] for level in levels]
    return own
