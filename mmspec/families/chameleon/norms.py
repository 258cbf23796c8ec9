"""Conversion of Lumina-mGPT's folders to the shapes that transformers loads.

The official code has one norm of queries and keys for each part of a model-parallel group, [parts, head_dim]
with one part for 7B and four for 34B, and repeats it at run time; transformers has one for each head.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from mmspec.atomic_file import new_folder
from mmspec.errors import CheckpointError
from mmspec.models.official_files import MAX_NAMED_KEYS, read_config
from mmspec.open_types import Json

__all__ = ["convert_chameleon", "is_chameleon"]

NORM = re.compile(r".*\.self_attn\.(?P<side>[qk])_norm\.(weight|bias)")
INDEX = "model.safetensors.index.json"


def is_chameleon(folder: Path) -> bool:
    """True if a folder's config is that of a Chameleon."""
    try:
        return read_config(folder).get("model_type") == "chameleon"
    except CheckpointError:
        return False


def convert_chameleon(folder: Path, out: Path, dtype: torch.dtype | None = None) -> Json:
    """Write a copy of a folder whose norms have one row for each head.

    Args:
        folder: folder with `config.json` and safetensors.
        out: folder to write; it appears complete or not at all.
        dtype: number format of the written weights; None keeps the file's.

    Returns:
        What was written: `path`, `kind`, `norms` repeated, `parameters`, `dtype`.

    Raises:
        CheckpointError: there are no safetensors, the config lacks the number of heads, or the shape of a
            norm cannot be repeated.
        InputError: `out` is not empty.
    """
    config = read_config(folder)
    queries = config.get("num_attention_heads", 0)
    heads: dict[str, int] = {"q": queries, "k": config.get("num_key_value_heads") or queries}
    shards = sorted(folder.glob("*.safetensors"))
    if not shards or not all(isinstance(count, int) and count > 0 for count in heads.values()):
        rule = "must be a folder of safetensors whose config.json has num_attention_heads"
        raise CheckpointError("checkpoint", str(folder), rule)
    for shard in shards:
        _check_norms(shard, heads)
    norms = parameters = size = 0
    kept: torch.dtype | None = None
    with new_folder(out) as temporary:
        for file in folder.iterdir():
            if file.is_file() and file not in shards:
                shutil.copy2(file, temporary / file.name)
        for shard in shards:
            tensors = load_file(shard)
            for name, tensor in tensors.items():
                norm = NORM.fullmatch(name)
                if norm and (times := heads[norm["side"]] // tensor.shape[0]) > 1:
                    tensor, norms = tensor.repeat_interleave(times, 0), norms + 1
                tensors[name] = (
                    tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
                )
                parameters += tensor.numel()
                size += tensors[name].nbytes
                kept = tensors[name].dtype
            save_file(tensors, temporary / shard.name, metadata={"format": "pt"})
        index = temporary / INDEX
        if index.is_file():
            table = json.loads(index.read_text())
            table["metadata"] = {**table.get("metadata", {}), "total_size": size}
            index.write_text(json.dumps(table, indent=2) + "\n")
    return {
        "path": str(out),
        "kind": "chameleon",
        "norms": norms,
        "parameters": parameters,
        "dtype": str(kept).removeprefix("torch."),
    }


def _check_norms(shard: Path, heads: dict[str, int]) -> None:
    """Raise CheckpointError unless the number of rows of each norm divides the number of heads."""
    try:
        with safe_open(shard, framework="pt") as file:
            found = [norm for name in file.keys() if (norm := NORM.fullmatch(name))]  # noqa: SIM118
            shapes = {norm: tuple(file.get_slice(norm.string).get_shape()) for norm in found}
    except Exception as error:  # safetensors raises errors of its own and of the system
        rule = f"must be a complete safetensors file ({error})"[:200]
        raise CheckpointError("checkpoint", str(shard), rule) from error
    wrong = [
        f"{norm.string} is {shape}"
        for norm, shape in shapes.items()
        if len(shape) != 2 or not shape[0] or heads[norm["side"]] % shape[0]
    ]
    if wrong:
        rule = f"must have norms whose rows divide the {heads['q']} query and {heads['k']} key heads"
        raise CheckpointError("checkpoint", str(shard), f"{rule}; {', '.join(wrong[:MAX_NAMED_KEYS])}")
