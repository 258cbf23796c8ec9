"""Inputs of transformers' `generate`: checked, and split into one request for each row.

Accepted inputs either have no effect (an empty cache, positions that follow from the mask) or are read in the
prefill alone. Other inputs act in every forward pass of `generate` and are refused by name.
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
from transformers.modeling_outputs import BaseModelOutput

from mmspec.core.cache import check_layer_types
from mmspec.core.interfaces import Request
from mmspec.errors import InputError
from mmspec.open_types import Inputs, Keywords
from mmspec.transformers_versions import CACHE_NAMES

__all__ = ["PATCHES", "check_inputs", "check_mask", "for_decoder", "split_rows"]

PREPARE = "prepare_inputs_for_generation"
M_ROPE_AXES = 3
#: Keywords of PEFT's hooks that give each row of a batch its adapter or its starting position.
OF_ROWS = {"adapter_names", "alora_offsets"}
#: Inputs that `generate` prepares for its own loop; dropped once `check_inputs` has accepted them.
OF_GENERATE = {
    *CACHE_NAMES,
    "attention_mask",
    "position_ids",
    "cache_position",
    "use_cache",
    "logits_to_keep",
}
#: Inputs of the prefill alone: images and audio, their positions, and how they are read.
OF_PROMPT = {
    *MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL, "mm_encoder_outputs",
    "mm_token_type_ids", "moe_mm_token_type_ids", "image_grid_thw", "video_grid_thw", "image_grid_hw",
    "second_per_grid_ts", "video_second_per_grid", "image_position_ids", "video_position_ids",
    "num_frames_per_video", "image_num_crops", "batch_num_images", "images_per_sample", "image_merge_sizes",
    "video_merge_sizes", "video_compression_mask", "spatial_shapes", "target_sizes", "target_sizes_videos",
    "tile_fine_mask", "image_pixel_values", "image_attention_mask", "feature_attention_mask",
    "audio_feature_lengths", "audio_input_features", "audio_embed_sizes", "audio_attention_mask",
}  # fmt: skip
#: Options of image encoding, with one value for all rows.
CHOICES = {
    "vision_feature_layer", "vision_feature_select_strategy", "vision_aspect_ratio", "downsample_mode",
    "interpolate_pos_encoding", "use_audio_in_video",
}  # fmt: skip
TOKEN_TYPES = "token_type_ids"
#: The output of an encoder for all rows, and its mask.
ENCODER_MASK = "encoder_attention_mask"
OF_ENCODER = {ENCODED_STATES := "encoder_outputs", ENCODER_MASK}
M_ROPE_DIMENSIONS = 3
#: Image patches [N, n, d], with their positions [N, n, 2].
PATCHES = ("pixel_values", "image_position_ids")
ENCODED, GRIDS, COUNTS = "mm_encoder_outputs", "image_grid_thw", "images_per_sample"
#: Config attributes of the placeholder token of each kind of encoded input.
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
}


def check_inputs(
    model: PreTrainedModel, input_ids: Tensor, model_kwargs: Inputs, given: Mapping[str, object]
) -> None:
    """Raise InputError for the first input that acts in `generate` but not in the accelerated loop.

    Args:
        model, input_ids, model_kwargs: arguments that `generate` passes to its loop.
        given: keywords of the caller.
    """
    if model_kwargs.get("inputs_embeds") is not None:
        rule = "must be None; pass the prompts as `input_ids`"
        raise InputError("inputs_embeds", model_kwargs["inputs_embeds"], rule)
    check_cache(model_kwargs)
    seen = check_mask(model, input_ids, model_kwargs.get("attention_mask"))
    check_positions(model, seen, model_kwargs, given.get("position_ids") is not None)
    check_names(model, model_kwargs)
    check_preparation(model, input_ids, model_kwargs)
    check_hooks(model)


def for_decoder(config: PreTrainedConfig, model_kwargs: Inputs) -> Keywords:
    """Name the arguments of an encoder-decoder's loop as a prompt of its target does.

    The mask of the tokens is then `attention_mask`, and that of the encoder `encoder_attention_mask`. Inputs
    that the encoder has read already are dropped. Those of other models are unchanged.
    """
    if not config.is_encoder_decoder:
        return dict(model_kwargs)
    read = OF_PROMPT | CHOICES | {"attention_mask", "decoder_attention_mask", "input_ids"}
    renamed = {name: value for name, value in model_kwargs.items() if name not in read}
    masks = {"attention_mask": "decoder_attention_mask", ENCODER_MASK: "attention_mask"}
    return renamed | {name: model_kwargs.get(given) for name, given in masks.items()}


def check_cache(model_kwargs: Inputs) -> None:
    """Raise InputError for a cache of the caller, which the accelerated loop would neither read nor fill."""
    for name in CACHE_NAMES:
        cache = model_kwargs.get(name)
        if cache is None:
            continue
        length = cached_tokens(cache)
        if length != 0 or getattr(cache, "_is_user_defined", False):
            held = type(cache).__name__ if length is None else f"{type(cache).__name__} of {length} tokens"
            raise InputError(name, held, "must be None; an accelerated call uses its own cache")


def cached_tokens(cache: Cache) -> int | None:
    """Return the number of tokens in a cache; None if it is unknown."""
    if not hasattr(cache, "get_seq_length"):
        return None
    try:
        return int(cache.get_seq_length())
    except ValueError:  # a cache of recurrent layers alone counts no tokens
        return None if cache.has_previous_state() else 0


def check_mask(model: PreTrainedModel, input_ids: Tensor, mask: Tensor | None) -> Tensor:
    """Check the attention mask of the prompts; return the visible tokens as booleans [B, L].

    Raises:
        InputError: the mask has another shape, values other than 0 and 1, hides the last token of a row, or
            has gaps although the model has layers that count positions.
    """
    if mask is None:
        return torch.ones_like(input_ids, dtype=torch.bool)
    if mask.shape != input_ids.shape:
        rule = f"must have one value for each token of the prompts, {list(input_ids.shape)}"
        raise InputError("attention_mask", list(mask.shape), rule)
    seen = mask != 0
    if not torch.equal(seen.to(mask.dtype), mask):
        raise InputError("attention_mask", mask.unique().tolist(), "must consist of zeros and ones")
    if not bool(seen[:, -1].all()):
        rows = (~seen[:, -1]).nonzero().flatten().tolist()
        got = f"rows {rows} that end in padding"
        raise InputError("attention_mask", got, "must have its padding on the left")
    is_padding_alone = bool((seen[:, 1:] >= seen[:, :-1]).all())
    kinds = set(check_layer_types(model.config.get_text_config(decoder=True)))
    if not is_padding_alone and kinds != {"full_attention"}:
        counting = ", ".join(sorted(kinds - {"full_attention"}))
        rule = f"must be zero in front of a prompt only; layers of type {counting} count hidden tokens"
        raise InputError("attention_mask", "hidden tokens inside a prompt", rule)
    return seen


def check_positions(model: PreTrainedModel, seen: Tensor, model_kwargs: Inputs, is_given: bool) -> None:
    """Raise InputError for positions that do not follow from the mask or (M-RoPE) cannot be continued."""
    positions, order = model_kwargs.get("position_ids"), model_kwargs.get("cache_position")
    if order is not None and order.tolist() != list(range(seen.shape[1])):
        raise InputError(
            "cache_position", order.tolist(), "must be None; an accelerated call uses its own positions"
        )
    if positions is None:
        return
    hidden = ~seen.to(positions.device)
    implied = (seen.long().cumsum(-1) - 1).to(positions.device)
    if positions.dim() == M_ROPE_DIMENSIONS:
        texts, axes = positions[:-M_ROPE_AXES], positions[-M_ROPE_AXES:]
        follows = positions.shape[1:] == seen.shape and bool(((texts == implied) | hidden).all())
        greatest = axes.amax(0).masked_fill(hidden, 0).amax(-1)
        follows = follows and bool((axes[..., -1] == greatest).all())
        rule = "must have its greatest position last on all axes, so that the next one is one more"
    else:
        # a model with several axes computes all of them, so positions with fewer axes are the caller's
        inner = getattr(model, "model", None)
        fewer = is_given and any(hasattr(part, "get_rope_index") for part in (model, inner))
        follows = not fewer and positions.shape[-1] == seen.shape[-1]
        follows = follows and bool(((positions == implied) | hidden).all())
        rule = "must be None or follow from `attention_mask`; other positions are not supported"
    if not follows:
        raise InputError("position_ids", positions.flatten().tolist(), rule)


def check_names(model: PreTrainedModel, model_kwargs: Inputs) -> None:
    """Raise InputError for an input that belongs to no prompt and differs from the default of `forward`."""
    has_images = hasattr(getattr(model, "model", None), "get_image_features")
    known = OF_GENERATE | OF_PROMPT | CHOICES | OF_ENCODER | ({TOKEN_TYPES} if has_images else set())
    usual = inspect.signature(model.forward).parameters
    for name, value in model_kwargs.items():
        says_nothing = is_empty(value) or (name in usual and is_same(usual[name].default, value))
        if name not in known and not says_nothing:
            rule = "is not supported; `generate` passes it to every forward pass, an accelerated call cannot"
            raise InputError(name, value, rule)
    keep = model_kwargs.get("logits_to_keep")
    if not (keep is None or isinstance(keep, int)):
        raise InputError(
            "logits_to_keep", keep, "must be a number; an accelerated call keeps the last logits"
        )


def is_same(default: object, value: object) -> bool:
    """Whether a plain value equals the default."""
    return isinstance(value, bool | int | float | str) and type(value) is type(default) and value == default


def check_preparation(model: PreTrainedModel, input_ids: Tensor, model_kwargs: Inputs) -> None:
    """Raise InputError if the model's `prepare_inputs_for_generation` changes the inputs.

    PEFT adds prompts and prefixes in this way, with a method of the instance. The method of a class outside
    transformers is tested by preparing the inputs of the first forward pass.
    """
    family = type(model)
    usual, prepare = getattr(family, PREPARE), getattr(model, PREPARE)
    if getattr(prepare, "__func__", None) is not usual or prepare.__self__ is not model:
        rule = "must be the method of the model's class; prompts or prefixes added by PEFT are not supported"
        raise InputError(PREPARE, getattr(prepare, "__qualname__", type(prepare).__name__), rule)
    if usual.__module__.partition(".")[0] == "transformers":
        return
    known = {"input_ids": input_ids, **model_kwargs}
    prepared = prepare(input_ids, is_first_iteration=True, **model_kwargs)
    for name, value in prepared.items():
        before = known.get(name)
        alike = value is before or is_empty(value)
        if isinstance(value, Tensor) and isinstance(before, Tensor):
            alike = torch.equal(value, before)
        if not alike and name != "cache_position":  # custom code still receives it
            raise InputError(PREPARE, family.__qualname__, f"must leave `{name}` unchanged")


def check_hooks(model: PreTrainedModel) -> None:
    """Raise InputError for hooks that pass per-row values of the caller's batch to layers."""
    for module in model.modules():
        for hook in module._forward_pre_hooks.values():
            names = OF_ROWS & set(hook.keywords) if isinstance(hook, functools.partial) else set()
            if names:
                rule = "must be None; prompts are read one row at a time"
                raise InputError(min(names), type(module).__name__, rule)


def split_rows(
    config: PreTrainedConfig,
    input_ids: Tensor,
    model_kwargs: Inputs,
    image_sizes: Sequence[int] | None = None,
) -> list[Request]:
    """Split a padded batch into one request per row, without padding.

    Images are assigned to rows by their placeholder tokens.

    Args:
        config: config of the model, which names the placeholders.
        input_ids: token ids [B, L], padded on the left.
        model_kwargs: arguments of the loop of `generate`, accepted by `check_inputs`.
        image_sizes: number of tokens of each image in `PATCHES`; None if there are none, or `generate`
            encodes them.

    Raises:
        InputError: an input of several rows cannot be split.
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
        own |= encoder_row(model_kwargs, row)
        if chosen := rows[row]:
            own |= {name: value[chosen.start : chosen.stop] for name, value in images.items()}
        if positions is not None and positions.dim() == M_ROPE_DIMENSIONS:
            # cannot be recomputed: the grids may have been dropped by now
            own["position_ids"] = positions[:, row : row + 1, kept]
        per_token = {name: value[row : row + 1, kept] for name, value in aligned.items()}
        requests.append(Request({"input_ids": input_ids[row : row + 1, kept], **own, **per_token}))
    return requests


def encoder_row(model_kwargs: Inputs, row: int) -> Keywords:
    """Return one row of the output of an encoder, with its mask, as a prompt has them; {} without one."""
    output, mask = model_kwargs.get(ENCODED_STATES), model_kwargs.get(ENCODER_MASK)
    if output is None:
        return {}
    own = {ENCODED_STATES: output_row(output, row)}
    return own if mask is None else own | {"attention_mask": mask[row : row + 1]}


def output_row(output: Any, row: int) -> Any:
    """Return one row of an encoder's output: its last states, and what else has a value for each row."""
    states = output[0] if isinstance(output, tuple) else output.last_hidden_state
    named = {"last_hidden_state": states} if isinstance(output, tuple) else dict(output)
    rows: Keywords = {
        name: value[row : row + 1]
        for name, value in named.items()
        if isinstance(value, Tensor) and len(value) == len(states)
    }
    return (BaseModelOutput if isinstance(output, tuple) else type(output))(**rows)


def is_empty(value: object) -> bool:
    """Whether a value has no effect: None, False or an empty dictionary."""
    return value is None or value is False or (isinstance(value, dict) and not value)


def rows_of(config: PreTrainedConfig, input_ids: Tensor, shared: Inputs) -> list[Keywords]:
    """Split the inputs without a value per token into rows.

    Raises:
        InputError: several rows share an input other than encoded images, or grids with a count per row.
    """
    count = len(input_ids)
    if count == 1:
        return [dict(shared)]
    rows: list[Keywords] = [
        {name: value for name, value in shared.items() if name in CHOICES} for _ in range(count)
    ]
    unknown = set(shared) - {ENCODED} - CHOICES - ({GRIDS, COUNTS} if COUNTS in shared else set())
    if unknown:
        rule = "must be passed one row at a time; only images encoded by transformers 5.23 can be split"
        raise InputError("inputs", sorted(unknown), rule)
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
    """Assign encoded images, with their numbers of tokens, to the rows [B, L] in order.

    Raises:
        InputError: the numbers of placeholders in the rows do not match the tokens of the images.
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
        rule = f"must have as many placeholders in each row as its images have tokens, {list(sizes)}"
        raise InputError("inputs", {f"{kind} placeholders": places}, rule)
    return found


def chosen_of(output: Any, chosen: range) -> Any:
    """Return the part of an encoder's output for some of the images."""
    own, part = copy.copy(output), slice(chosen.start, chosen.stop)
    own.pooler_output = output.pooler_output[part]
    if (levels := getattr(output, "deepstack_features", None)) is not None:
        own.deepstack_features = [level[part] for level in levels]
    return own
