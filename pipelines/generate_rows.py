"""Rows of a padded batch as transformers' `generate` prepares it, each with its own images."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig
from transformers.generation.utils import MULTIMODAL_INPUTS_TO_DROP_OUTSIDE_PREFILL

from mmspec.decoding.interfaces import Request
from mmspec.errors import InputError

__all__ = ["split_rows"]

#: The cache, by the names that transformers has given it.
CACHES = ("past_key_values", "cache")
#: What generate prepares for its own loop; dropped, once `check_inputs` finds nothing new in it.
OF_GENERATE = {*CACHES, "attention_mask", "position_ids", "cache_position", "use_cache", "logits_to_keep"}
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
ENCODED, GRIDS, COUNTS = "mm_encoder_outputs", "image_grid_thw", "images_per_sample"
#: Attributes of configs that name the token which each kind of encoded input stands at.
PLACEHOLDERS = {
    "image": ("image_token_id", "image_token_index"),
    "video": ("video_token_id", "video_token_index"),
}


def split_rows(config: PreTrainedConfig, input_ids: Tensor, model_kwargs: Mapping[str, Any]) -> list[Request]:
    """Split a padded batch into one request per row, without its padding.

    Images that `generate` has encoded go to the rows in whose placeholders they belong.

    Args:
        config: of the model, which names the placeholders.
        input_ids: [B, L], padded on the left.
        model_kwargs: what `generate` hands to its loop, and `check_inputs` has found to be of the prompt.

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
    positions = model_kwargs.get("position_ids")
    requests = []
    for row, own in enumerate(rows_of(config, input_ids, shared)):
        kept = seen[row]
        if positions is not None and positions.dim() == M_ROPE_DIMENSIONS:
            # the grids they were made from may be gone by now
            own["position_ids"] = positions[:, row : row + 1, kept]
        per_token = {name: value[row : row + 1, kept] for name, value in aligned.items()}
        requests.append(Request({"input_ids": input_ids[row : row + 1, kept], **own, **per_token}))
    return requests


def is_empty(value: object) -> bool:
    """True for what says nothing: None, False and an empty dictionary."""
    return value is None or value is False or (isinstance(value, dict) and not value)


def rows_of(config: PreTrainedConfig, input_ids: Tensor, shared: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Inputs that are not one value a token, row by row.

    Raises:
        InputError: several rows share one that is not encoded images, or grids with their number in each row.
    """
    count = len(input_ids)
    if count == 1:
        return [dict(shared)]
    rows: list[dict[str, Any]] = [
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
    """Which of the encoded images, of so many tokens each, belong to each row [B, L], in their order.

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
    """What an encoder made of some images alone."""
    own, part = copy.copy(output), slice(chosen.start, chosen.stop)
    own.pooler_output = output.pooler_output[part]
    if (levels := getattr(output, "deepstack_features", None)) is not None:
        own.deepstack_features = [level[part] for level in levels]
    return own
