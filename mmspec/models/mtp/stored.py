"""Tensors of a layer as checkpoints store them: experts one by one, weights in float8 beside their scales."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedConfig

from mmspec.errors import CheckpointError

__all__ = ["fuse_experts", "scale_weights"]

#: What a matrix of all experts holds of each, one below the other; by the names of transformers.
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
SHORT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
ONE = re.compile(r"(?P<place>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")
BIAS = "e_score_correction_bias"
SCALES = ("_scale_inv", "_scale")
WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)


def scale_weights(path: Path, tensors: Mapping[str, Tensor], target: PreTrainedConfig) -> dict[str, Tensor]:
    """Multiply float8 weights by the scales of their blocks.

    Args:
        path: for messages.
        tensors: by name; the scale of `x` is `x_scale_inv` or `x_scale`.
        target: whose `quantization_config` may give the size of a block.

    Returns:
        The tensors, without the scales that were used.

    Raises:
        CheckpointError: a weight is in numbers of another kind, has no scale, or one of another shape.
    """
    stored: Any = getattr(target, "quantization_config", None) or {}
    table: Mapping[str, Any] = stored if isinstance(stored, Mapping) else vars(stored)
    given = table.get("weight_block_size")
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype in WIDE or name.endswith(SCALES):
            continue
        scale = next((found.pop(name + end) for end in SCALES if name + end in found), None)
        if not tensor.is_floating_point() or scale is None or not scale.is_floating_point():
            beside = None if scale is None else scale.dtype
            what = f"{name} is in {tensor.dtype}, its scales in {beside}".replace("torch.", "")
            allowed = f"weights in float32, bfloat16 or float16, or in float8 with scales beside them; {what}"
            raise CheckpointError("drafter", str(path), allowed)
        found[name] = tensor.float() * _spread(path, name, scale.float(), tensor.shape, given)
    return found


def _spread(path: Path, name: str, scale: Tensor, shape: torch.Size, given: Any) -> Tensor:
    """Repeat the scale of each block over its block."""
    if scale.numel() == 1:
        return scale.reshape(())
    blocks = [1] * (len(shape) - 2) + list(given or ())
    for axis, size in enumerate(shape):
        count = scale.shape[axis] if scale.dim() == len(shape) else 0
        block = blocks[axis] if axis < len(blocks) and count == -(-size // blocks[axis]) else 0
        block = block or (size // count if count and size % count == 0 else 0)
        if not block:
            allowed = f"scales of blocks of {given} of {name}, {tuple(shape)}; they are {tuple(scale.shape)}"
            raise CheckpointError("drafter", str(path), allowed)
        scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scale


def fuse_experts(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Put experts that are stored one by one into the matrices of all of them.

    Args:
        path: for messages.
        tensors: by the model's names, except for what is `experts.N.gate_proj.weight` and the like.
        expected: shapes of the model's tensors; [experts, ...] those of experts.

    Returns:
        The tensors by the model's own names.

    Raises:
        CheckpointError: experts are missing, too many, or of another shape than the target's config says.
    """
    single: dict[tuple[str, str], dict[int, str]] = {}
    for name in tensors:
        if found := ONE.fullmatch(name):
            part = SHORT.get(found["part"], found["part"])
            single.setdefault((found["place"], part), {})[int(found["number"])] = name
    fused = dict(tensors)
    for name, shape in expected.items():
        place, _, matrix = name.rpartition(".")
        parts = [single[place, part] for part in PARTS.get(matrix, ()) if (place, part) in single]
        if name in fused or not parts or len(parts) != len(PARTS[matrix]):
            continue
        for numbers in parts:
            if differs := sorted(set(numbers) ^ set(range(shape[0]))):
                allowed = (
                    f"{shape[0]} experts, numbered from 0, as the target's config says; "
                    f"{max(numbers.values())} and its like are {len(numbers)}, number {differs[0]} differs"
                )
                raise CheckpointError("drafter", str(path), allowed)
            rows = (shape[1] // len(parts), *shape[2:])
            wrong = next((own for own in numbers.values() if tuple(tensors[own].shape) != rows), None)
            if wrong:
                allowed = f"wrong shapes: {wrong} is {tuple(tensors[wrong].shape)} instead of {rows}"
                raise CheckpointError("drafter", str(path), allowed)
        fused[name] = torch.stack(
            [torch.cat([fused.pop(numbers[expert]) for numbers in parts]) for expert in range(shape[0])]
        )
    return _with_bias(fused, expected)


def _with_bias(tensors: dict[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """The same, with the bias of a router where transformers has it: some files keep it beside the router."""
    own = next((name for name in expected if name.endswith(BIAS)), None)
    theirs = next((name for name in tensors if name.endswith(BIAS) and name not in expected), None)
    if own and theirs and own not in tensors:
        tensors[own] = tensors.pop(theirs)
    return tensors
