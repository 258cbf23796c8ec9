"""Conversion of official PAR checkpoints, in LlamaGen's layout with special tokens."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from mmspec.families.llamagen.conversion import from_layout
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.par.modeling import PARForCausalLM

SPECIAL = "spe_tok_embeddings.special_embeddings."


def par_from_official(
    path: Path, tensors: Mapping[str, Tensor], image_size: int | None, num_heads: int | None
) -> LlamaGenForCausalLM | None:
    """Build the PAR of an official state dict; None for another model's."""
    if (weight := tensors.get(f"{SPECIAL}weight")) is None:
        return None
    how, renames = (path, tensors, image_size, num_heads), [(r"^model\.special_tokens\.", SPECIAL)]
    return from_layout(*how, PARForCausalLM, renames, regions=1 + len(weight))
