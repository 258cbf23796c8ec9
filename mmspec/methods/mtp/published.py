"""Reader of MTP layers in their targets' checkpoints: Qwen's `mtp.*`, or DeepSeek's additional layer."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor
from transformers import PreTrainedConfig

from mmspec.errors import CheckpointError, InputError
from mmspec.methods.mtp.head import MtpConfig, MtpHead, with_experts
from mmspec.models.checkpoint import read_index
from mmspec.models.official_files import fill, replace_prefix
from mmspec.open_types import Json, Keywords

__all__ = ["PUBLISHED", "fuse_experts", "read_mtp", "scale_weights", "write_checkpoint"]

#: Parts of each expert in a matrix of all experts, one below the other; by the names of transformers.
PARTS = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}
SHORT = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
ONE = re.compile(r"(?P<place>.*\.experts)\.(?P<number>\d+)\.(?P<part>\w+)\.weight")
BIAS = "e_score_correction_bias"
SCALES = ("_scale_inv", "_scale")
WIDE = (torch.float32, torch.float64, torch.bfloat16, torch.float16)

logger = logging.getLogger(__name__)

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
#: Names of Qwen's layout, and the names in `MtpHead`.
PUBLISHED = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_embedding.": "norm_embedding.",
    "mtp.pre_fc_norm_hidden.": "norm_hidden.",
    "mtp.norm.": "decoder.norm.",
    "mtp.layers.0.": "decoder.layers.0.",
}
#: The same for DeepSeek's layout, after the number of the layer; other names belong to the layer itself.
BEHIND = {
    "enorm.": "norm_embedding.",
    "hnorm.": "norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "decoder.norm.",
}
SHARED = r"embed_tokens\..*|shared_head\.head\..*"  # copies of the target's own matrices
PLACES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")
OWN_FILE = "mtp.safetensors"  # of a head beside a copy of its target
LAYERS = "mtp_num_hidden_layers"  # of Qwen's configs


def scale_weights(path: Path, tensors: Mapping[str, Tensor], target: PreTrainedConfig) -> dict[str, Tensor]:
    """Multiply float8 weights by the scales of their blocks: `x_scale_inv` or `x_scale` for `x`."""
    stored = getattr(target, "quantization_config", None) or {}
    table: Mapping[str, object] = stored if isinstance(stored, Mapping) else vars(stored)
    given = table.get("weight_block_size")
    found = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype in WIDE or name.endswith(SCALES):
            continue
        scale = next((found.pop(name + end) for end in SCALES if name + end in found), None)
        if not tensor.is_floating_point() or scale is None or not scale.is_floating_point():
            beside = None if scale is None else scale.dtype
            what = f"{name} is in {tensor.dtype}, its scales in {beside}".replace("torch.", "")
            rule = f"must have weights in float32, bfloat16, float16, or float8 with scales ({what})"
            raise CheckpointError("drafter", str(path), rule)
        found[name] = tensor.float() * _spread(path, name, scale.float(), tensor.shape, given)
    return found


def _spread(path: Path, name: str, scale: Tensor, shape: torch.Size, given: Any) -> Tensor:
    """Repeat the scale of each block over the block."""
    if scale.numel() == 1:
        return scale.reshape(())
    blocks = [1] * (len(shape) - 2) + list(given or ())
    for axis, size in enumerate(shape):
        count = scale.shape[axis] if scale.dim() == len(shape) else 0
        block = blocks[axis] if axis < len(blocks) and count == -(-size // blocks[axis]) else 0
        block = block or (size // count if count and size % count == 0 else 0)
        if not block:
            rule = (
                f"must have scales for blocks of {given} of {name}, which has shape {tuple(shape)}; "
                f"its scales have shape {tuple(scale.shape)}"
            )
            raise CheckpointError("drafter", str(path), rule)
        scale = scale.repeat_interleave(block, axis).narrow(axis, 0, size)
    return scale


def fuse_experts(
    path: Path, tensors: Mapping[str, Tensor], expected: Mapping[str, tuple[int, ...]]
) -> dict[str, Tensor]:
    """Join experts that are stored one by one into the matrices of all experts, by the model's own names."""
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
                rule = (
                    f"must have {shape[0]} experts, numbered from 0, as in the target's config; there are "
                    f"{len(numbers)} tensors like {max(numbers.values())}, and number {differs[0]} differs"
                )
                raise CheckpointError("drafter", str(path), rule)
            rows = (shape[1] // len(parts), *shape[2:])
            wrong = next((own for own in numbers.values() if tuple(tensors[own].shape) != rows), None)
            if wrong:
                rule = f"must have {wrong} of shape {rows}, not {tuple(tensors[wrong].shape)}"
                raise CheckpointError("drafter", str(path), rule)
        fused[name] = torch.stack(
            [torch.cat([fused.pop(numbers[expert]) for numbers in parts]) for expert in range(shape[0])]
        )
    return _with_bias(fused, expected)


def _with_bias(tensors: dict[str, Tensor], expected: Mapping[str, tuple[int, ...]]) -> dict[str, Tensor]:
    """Rename the bias of a router to its place in transformers; some files keep it beside the router."""
    own = next((name for name in expected if name.endswith(BIAS)), None)
    theirs = next((name for name in tensors if name.endswith(BIAS) and name not in expected), None)
    if own and theirs and own not in tensors:
        tensors[own] = tensors.pop(theirs)
    return tensors


def read_mtp(folder: Path, target: PreTrainedConfig) -> MtpHead | None:
    """Read the MTP layer in a target's checkpoint of safetensors; None if there is none.

    The first of several layers is read, and is run again on its own states.

    Raises:
        CheckpointError: a file is damaged; keys are missing, unknown or of another shape; the number of
            experts differs, or the number format of the weights is not supported.
    """
    text = target.get_text_config(decoder=True)
    files = weight_files(folder)
    own = {name: renamed for name in files if (renamed := own_name(name, int(text.num_hidden_layers)))}
    if not own:
        return None
    further = sum(bool(re.search(r"mtp\.layers\.[1-9]", name)) for name in files)
    if further:
        logger.info("%s has more than one MTP layer; only the first is read", folder)
    config = MtpConfig.for_target(target, int(text.vocab_size))
    sparse = any(".experts." in name for name in own.values())
    config.layer = with_experts(config.layer, sparse)
    head = MtpHead(config)
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    tensors = scale_weights(folder, read_tensors(files, own), target)
    fill(folder, head, fuse_experts(folder, tensors, expected))
    return head


def own_name(name: str, layers: int) -> str | None:
    """Return the name in `MtpHead` of a published tensor; None if it is not part of the first MTP layer."""
    place = next((place for place in sorted(PLACES, key=len, reverse=True) if name.startswith(place)), "")
    bare = name.removeprefix(place)
    if (renamed := replace_prefix(bare, PUBLISHED)) != bare:
        return renamed
    behind = f"layers.{layers}."
    if not bare.startswith(behind):
        return None
    bare = bare.removeprefix(behind)
    if re.fullmatch(SHARED, bare):
        return None
    renamed = replace_prefix(bare, BEHIND)
    return renamed if renamed != bare else f"decoder.layers.0.{bare}"


def weight_files(folder: Path) -> dict[str, Path]:
    """Return the file of each tensor of a checkpoint, by the tensor's name; {} if it has no safetensors."""
    index, single = folder / INDEX, folder / WEIGHTS
    if index.is_file():
        return {name: folder / file for name, file in read_index(index).items()}
    if not single.is_file():
        return {}
    try:
        with safe_open(single, framework="pt") as weights:
            return dict.fromkeys(weights.keys(), single)
    except (OSError, SafetensorError) as error:
        raise CheckpointError("drafter", str(single), f"must be a complete checkpoint ({error})") from error


def read_tensors(files: Mapping[str, Path], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Read tensors; `names` maps each name in the files to the name in the head."""
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(files[name] for name in names):
        inside = [name for name in names if files[name] == file]
        try:
            with safe_open(file, framework="pt") as weights:
                tensors |= {names[name]: weights.get_tensor(name) for name in inside}
        except (OSError, SafetensorError) as error:
            raise CheckpointError("drafter", str(file), f"must contain {inside[0]} ({error})") from error
    return tensors


def write_checkpoint(
    head: MtpHead, layout: str, target: str, config: PreTrainedConfig, folder: Path
) -> Keywords:
    """Copy a target's checkpoint of safetensors in Qwen's layout, and add the head in a file of its own.

    Raises:
        CheckpointError: `target` is not such a checkpoint, or has an MTP layer already.
        InputError: the head drafts a part of the vocabulary alone, which engines do not support.
    """
    source = Path(target)
    if (known := head.config.frequent_tokens) != 0:
        rule = "must be 0: the MTP layer of a checkpoint drafts all tokens of its target"
        raise InputError("frequent_tokens", known, rule)
    files = weight_files(source)
    if not files:
        raise CheckpointError("target", str(source), f"must be a folder with {WEIGHTS} or {INDEX}")
    own = {
        theirs + name.removeprefix(ours): tensor.contiguous()
        for name, tensor in head.state_dict().items()
        for theirs, ours in PUBLISHED.items()
        if name.startswith(ours)
    }
    if own.keys() & files.keys():
        raise CheckpointError("target", str(source), "must not have an MTP layer already")
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    save_file(own, folder / OWN_FILE, metadata={"format": "pt"})
    names = {name: file.name for name, file in files.items()} | dict.fromkeys(own, OWN_FILE)
    size = sum((folder / name).stat().st_size for name in set(names.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    path = folder / "config.json"
    stored: Json = json.loads(path.read_text(encoding="utf-8"))
    stored.get("text_config", stored)[LAYERS] = 1
    path.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    return {}
