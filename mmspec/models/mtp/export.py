"""MTP heads as they are published: in the checkpoint of their target, by Qwen's names."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from mmspec.errors import CheckpointError
from mmspec.models.mtp.modeling import MtpHead
from mmspec.models.mtp.official import INDEX, PUBLISHED, WEIGHTS, weight_files

__all__ = ["write_checkpoint"]

OWN_FILE = "mtp.safetensors"
LAYERS = "mtp_num_hidden_layers"  # of Qwen's configs


def write_checkpoint(head: MtpHead, source: Path, folder: Path) -> None:
    """Copy a checkpoint, with a head in a file of its own.

    Args:
        head: for that model, whose layers have Qwen's names.
        source: folder of the model, in safetensors.
        folder: to write into, without files.

    Raises:
        CheckpointError: the folder has no safetensors, or an MTP layer already.
    """
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
    config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    config.get("text_config", config)[LAYERS] = 1
    path.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
