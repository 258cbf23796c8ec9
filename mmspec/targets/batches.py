"""Batches of whole sequences: which sequences can share a forward pass, and how to join their arguments.

Sequences are padded on the right, where causal attention never reads. Images are concatenated along dim 0, in
the order of the sequences, as processors return them for a batch. Missing tiles of an image are zeros, which
the model skips.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import inf

import torch
from torch import Tensor
from transformers import PreTrainedModel

from mmspec.core.rows import lengthen
from mmspec.open_types import Inputs
from mmspec.targets.prefix import PER_TOKEN, is_causal, media_of
from mmspec.targets.rotary import change_of
from mmspec.visual_tokens.spans import find_images

__all__ = ["EMBEDDINGS", "batches", "group_by_length", "join"]

EMBEDDINGS = "inputs_embeds"  # [1, L, d], instead of ids
TILED = ("pixel_values", "pixel_attention_mask")  # [images, tiles, ..]
TILES_TOLD = ("image_sizes", "pixel_attention_mask")  # either one marks the tiles that exist
LEAST_SHARE = 0.75  # of the longest sequence, because padding costs as much as tokens
SHORT_SHARE = 0.5  # of short prompts: a forward pass of its own costs more than so much padding
GLOBAL_ROPE = ("dynamic", "longrope")  # frequencies depend on the longest sequence of a forward pass


def batches(
    model: PreTrainedModel, rows: Sequence[Inputs], least_share: float = LEAST_SHARE, most: float = inf
) -> list[list[int]]:
    """Group sequences that can share a forward pass.

    A group has sequences of about the same length whose arguments have the same names and differ only in the
    numbers of tokens, images and tiles. A sequence is processed alone if it has an unknown argument, images
    that may attend to later tokens (see `is_causal`) or images without placeholder tokens (cross-attention),
    and always if the model's rotary frequencies depend on the longest sequence.

    Args:
        model: the target's.
        rows: its arguments for each sequence alone, including `position_ids` [.., 1, L].
        least_share, most: see `group_by_length`.

    Returns:
        Indices of rows, one list per forward pass, the longest sequences first.
    """
    if change_of(model.config)[1] in GLOBAL_ROPE:
        return [[index] for index in range(len(rows))]
    lengths = [inputs["position_ids"].shape[-1] for inputs in rows]
    alike: dict[tuple[object, ...] | int, list[int]] = {}
    for index in sorted(range(len(rows)), key=lambda row: -lengths[row]):
        known = {name: value for name, value in rows[index].items() if name != EMBEDDINGS}
        joinable = is_causal(model, known) and (not media_of(known) or find_images(model.config, known))
        alike.setdefault(_form(rows[index]) if joinable else index, []).append(index)
    groups = []
    for found in alike.values():
        by_length = group_by_length([lengths[row] for row in found], least_share, most)
        groups += [[found[place] for place in together] for together in by_length]
    return groups


def group_by_length(
    lengths: Sequence[int], least_share: float = SHORT_SHARE, most: float = inf
) -> list[list[int]]:
    """Group sequences by their lengths.

    Args:
        lengths: of the sequences.
        least_share: shortest length in a group, as a share of the longest.
        most: largest number of tokens of a group of several, padding included.

    Returns:
        Indices of sequences, one list for each group, the longest first.
    """
    groups: list[list[int]] = []
    for index in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longest = lengths[groups[-1][0]] if groups else 0
        is_alike = lengths[index] >= least_share * longest
        if not groups or not is_alike or longest * (len(groups[-1]) + 1) > most:
            groups.append([])
        groups[-1].append(index)
    return groups


def join(rows: Sequence[Inputs]) -> dict[str, Tensor]:
    """Join the arguments of sequences that `batches` grouped."""
    if len(rows) == 1:
        return dict(rows[0])
    joined = {}
    for name in rows[0]:
        batch, padded = _dims(name, rows[0])
        values = [row[name] for row in rows]
        if padded is not None:
            longest = max(value.shape[padded] for value in values)
            values = [lengthen(value.movedim(padded, 1), longest).movedim(1, padded) for value in values]
        joined[name] = torch.cat(values, batch)
    return joined


def _form(inputs: Inputs) -> tuple[object, ...]:
    """Properties that must be equal for sequences that share a forward pass."""
    form = []
    for name, value in sorted(inputs.items()):
        free = {dim % value.dim() for dim in _dims(name, inputs) if dim is not None}
        fixed = tuple(size for dim, size in enumerate(value.shape) if dim not in free)
        form.append((name, value.dtype, fixed))
    return tuple(form)


def _dims(name: str, inputs: Inputs) -> tuple[int, int | None]:
    """The dimension of an argument along which sequences are joined, and the one that is padded first."""
    if name in PER_TOKEN:
        return -2, -1
    if name == EMBEDDINGS:
        return 0, 1
    tiled = name in TILED and inputs["pixel_values"].dim() == 5 and any(told in inputs for told in TILES_TOLD)
    return 0, 1 if tiled else None
