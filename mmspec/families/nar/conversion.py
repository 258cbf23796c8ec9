"""Conversion of official NAR checkpoints, in LlamaGen's layout with a second output matrix."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mmspec.families.llamagen.conversion import from_layout
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.nar.modeling import NARForCausalLM

# the part of a name -> the official one
RENAMES = (
    (r"^lm_head\.right\.", "output."),
    (r"^lm_head\.below\.", "medusa_output."),
    (r"^model\.below_norm\.", "medusa_norm."),
)


def nar_from_official(
    path: Path, tensors: Mapping[str, Tensor], image_size: int | None, num_heads: int | None
) -> LlamaGenForCausalLM | None:
    """Build the NAR of an official state dict, with one layer more than its size; None for other models."""
    if "medusa_norm.weight" not in tensors:
        return None
    how = path, tensors, image_size, num_heads
    return from_layout(*how, NARForCausalLM, RENAMES, further_layers=1)
