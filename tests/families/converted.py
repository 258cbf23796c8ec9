"""Official checkpoints on disk, converted and loaded again."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from mmspec.families.llamagen.conversion import convert_checkpoint
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from tests.families.official_layout import HEADS, IMAGE_SIZE


def convert_and_load(
    folder: Path, content: Any, *, heads: int = HEADS, name: str = "tiny.pt", **loading: Any
) -> LlamaGenForCausalLM:
    """Save as a pickle, convert, load by the auto class."""
    torch.save(content, folder / name)
    size = {} if name != "tiny.pt" else {"image_size": IMAGE_SIZE}
    convert_checkpoint(folder / name, folder / "converted", num_heads=heads, **size)
    return AutoModelForCausalLM.from_pretrained(folder / "converted", **loading)
