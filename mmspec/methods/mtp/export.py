"""Writer of MTP heads in a copy of their target, as Qwen's checkpoints hold them."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file
from transformers import PreTrainedConfig

from mmspec.errors import CheckpointError, InputError
from mmspec.methods.mtp.head import MtpHead
from mmspec.methods.mtp.published import INDEX, PUBLISHED, WEIGHTS, weight_files

OWN_FILE = "mtp.safetensors"

LAYERS = "mtp_num_hidden_layers"  # of Qwen's configs


def write_checkpoint(
    head: MtpHead, layout: str, target: str, config: PreTrainedConfig, folder: Path
) -> dict[str, Any]:
    """Copy a checkpoint in safetensors, whose layers have Qwen's names, with a head in a file of its own.

    Raises:
        CheckpointError: it is none, or has an MTP layer.
        InputError: the head drafts a part of the vocabulary, which engines cannot be told.
    """
    source = Path(target)
    if (known := head.config.frequent_tokens) != 0:
        raise InputError(
            "frequent_tokens", known, "0: a checkpoint's layer drafts all of its target's tokens"
        )
    files = weight_files(source)
    if not files:
        raise CheckpointError("target", str(source), f"a folder with {WEIGHTS} or {INDEX}")
    own = {
        theirs + name.removeprefix(ours): tensor.contiguous()
        for name, tensor in head.state_dict().items()
        for theirs, ours in PUBLISHED.items()
        if name.startswith(ours)
    }
    if own.keys() & files.keys():
        raise CheckpointError("target", str(source), "a checkpoint without an MTP layer; this one has one")
    for file in source.iterdir():
        if file.is_file():
            shutil.copyfile(file, folder / file.name)
    save_file(own, folder / OWN_FILE, metadata={"format": "pt"})
    names = {name: file.name for name, file in files.items()} | dict.fromkeys(own, OWN_FILE)
    size = sum((folder / name).stat().st_size for name in set(names.values()))
    index = {"metadata": {"total_size": size}, "weight_map": dict(sorted(names.items()))}
    (folder / INDEX).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")
    path = folder / "config.json"
    stored: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    stored.get("text_config", stored)[LAYERS] = 1
    path.write_text(json.dumps(stored, indent=2) + "\n", encoding="utf-8")
    return {}
