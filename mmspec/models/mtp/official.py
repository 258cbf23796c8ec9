"""MTP layers in the checkpoints of their targets: Qwen's `mtp.*`, or DeepSeek's layer behind the last."""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedConfig

from mmspec.errors import CheckpointError
from mmspec.models.mtp.configuration import MtpConfig, with_experts
from mmspec.models.mtp.modeling import MtpHead
from mmspec.models.mtp.stored import fuse_experts, scale_weights
from mmspec.models.official_files import fill, replace_prefix

__all__ = ["PUBLISHED", "read_official"]

logger = logging.getLogger(__name__)

INDEX, WEIGHTS = "model.safetensors.index.json", "model.safetensors"
#: Names of Qwen's layout, and those that the head has here.
PUBLISHED = {
    "mtp.fc.": "fc.",
    "mtp.pre_fc_norm_embedding.": "norm_embedding.",
    "mtp.pre_fc_norm_hidden.": "norm_hidden.",
    "mtp.norm.": "decoder.norm.",
    "mtp.layers.0.": "decoder.layers.0.",
}
#: Names of DeepSeek's layout behind the number of the layer; what is not here belongs to the layer itself.
BEHIND = {
    "enorm.": "norm_embedding.",
    "hnorm.": "norm_hidden.",
    "eh_proj.": "fc.",
    "shared_head.norm.": "decoder.norm.",
}
SHARED = r"embed_tokens\..*|shared_head\.head\..*"  # copies of the target's own matrices
PLACES = ("", "model.", "language_model.", "model.language_model.", "language_model.model.")


def read_official(folder: Path, target: PreTrainedConfig) -> MtpHead | None:
    """Read the MTP layer in the checkpoint of a target; None if there is none.

    Of several layers the first is read, and goes on from its own states.

    Args:
        folder: of the target's checkpoint, in safetensors.
        target: its config.

    Raises:
        CheckpointError: a file is damaged; keys are missing, unknown or of another shape; experts are of
            another number, or weights in numbers that are not read.
    """
    text = target.get_text_config(decoder=True)
    files = weight_files(folder)
    own = {name: renamed for name in files if (renamed := own_name(name, int(text.num_hidden_layers)))}
    if not own:
        return None
    further = sum(bool(re.search(r"mtp\.layers\.[1-9]", name)) for name in files)
    if further:
        logger.info("%s has more MTP layers than one; the first is read", folder)
    config = MtpConfig.for_target(target, int(text.vocab_size))
    sparse = any(".experts." in name for name in own.values())
    config.layer = with_experts(config.layer, sparse)
    head = MtpHead(config)
    expected = {name: tuple(tensor.shape) for name, tensor in head.state_dict().items()}
    tensors = scale_weights(folder, read_tensors(files, own), target)
    fill(folder, head, fuse_experts(folder, tensors, expected))
    return head


def own_name(name: str, layers: int) -> str | None:
    """The name here of a published tensor; None if it is none of the first MTP layer's."""
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
    """Tensors of a checkpoint by name, with the file that each is in; {} where there are no safetensors.

    Raises:
        CheckpointError: the index or the file is damaged.
    """
    index, single = folder / INDEX, folder / WEIGHTS
    try:
        if index.is_file():
            table: dict[str, Any] = json.loads(index.read_text())["weight_map"]
            return {name: folder / str(file) for name, file in table.items()}
        if not single.is_file():
            return {}
        with safe_open(single, framework="pt") as weights:
            return dict.fromkeys(weights.keys(), single)
    except (OSError, ValueError, KeyError, AttributeError, SafetensorError) as error:
        raise CheckpointError("drafter", str(folder), f"a complete checkpoint ({error})") from error


def read_tensors(files: Mapping[str, Path], names: Mapping[str, str]) -> dict[str, Tensor]:
    """Read tensors of safetensors files.

    Args:
        files: by the names there.
        names: that are wanted, and what each is called here.

    Raises:
        CheckpointError: a file is damaged or lacks one.
    """
    tensors: dict[str, Tensor] = {}
    for file in dict.fromkeys(files[name] for name in names):
        inside = [name for name in names if files[name] == file]
        try:
            with safe_open(file, framework="pt") as weights:
                tensors |= {names[name]: weights.get_tensor(name) for name in inside}
        except (OSError, SafetensorError) as error:
            raise CheckpointError("drafter", str(file), f"a file with {inside[0]} ({error})") from error
    return tensors
