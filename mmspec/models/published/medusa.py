"""Medusa's heads as their authors publish them: `medusa_lm_head.pt`, or the same as safetensors.

The config beside it is not to be trusted (that of medusa-vicuna-7b-v1.3 speaks of two heads; the file holds
five), so every size is measured.
"""

from __future__ import annotations

import re
from pathlib import Path

from transformers import PreTrainedConfig

from mmspec.models.medusa import MedusaConfig, MedusaHead
from mmspec.models.official_files import fill, find_file, find_tensors, measure, open_checkpoint

__all__ = [
    "read_medusa",
]

FILES = ("medusa_lm_head.safetensors", "medusa_lm_head.pt")
# head i is a sequence: residual blocks 0 ... n - 1, then its output matrix at n
BLOCK = re.compile(r"(?:medusa_head\.)?(\d+)\.(\d+)\.linear\.(weight|bias)")
OUTPUT = re.compile(r"(?:medusa_head\.)?(\d+)\.\d+\.weight")


def read_medusa(folder: Path, target: PreTrainedConfig) -> MedusaHead | None:
    """Read the heads in a folder of that layout; None if it is no such folder.

    Args:
        folder: with the file.
        target: of what they are to draft for. Which target they were trained for is not written anywhere;
            its width and vocabulary are checked when they are fit to it.

    Raises:
        CheckpointError: the file is damaged, or keys are missing, unknown or of another shape.
    """
    path = find_file(folder, FILES)
    if path is None:
        return None
    found = find_tensors(path, open_checkpoint(path))
    tensors = {own_name(name): tensor for name, tensor in found.items()}
    block = r"blocks\.(\d+)\.(\d+)\.weight"
    places = [match.groups() for name in tensors if (match := re.fullmatch(block, name))]
    head = MedusaHead(
        MedusaConfig(
            vocabulary=measure(path, tensors, r"lm_heads\.\d+\.weight"),
            hidden_size=measure(path, tensors, r"lm_heads\.\d+\.weight", axis=1),
            num_heads=len([name for name in tensors if name.startswith("lm_heads.")]),
            num_layers=1 + max((int(layer) for _, layer in places), default=-1),
            own_lm_heads=True,
        )
    )
    fill(path, head, tensors)
    return head


def own_name(name: str) -> str:
    """The name that a published tensor has here; what is unknown keeps its own."""
    if match := BLOCK.fullmatch(name):
        return f"blocks.{match[1]}.{match[2]}.{match[3]}"
    if match := OUTPUT.fullmatch(name):
        return f"lm_heads.{match[1]}.weight"
    return name
