"""Models of official PAR checkpoints, in LlamaGen's layout with special tokens."""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from mmspec.families.llamagen.conversion import RENAMES, infer_config
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.official_layout import build, grid_size_of, renamed
from mmspec.families.par.modeling import PARConfig, PARForCausalLM
from mmspec.models.official_files import measure

SPECIAL = "spe_tok_embeddings.special_embeddings."
# the part of a name -> the official one
OWN_RENAMES = ((r"^model\.special_tokens\.", SPECIAL),)


def par_from_official(
    path: Path, tensors: Mapping[str, Tensor], image_size: int | None, num_heads: int | None
) -> LlamaGenForCausalLM | None:
    """The PAR of an official state dict; None of another."""
    weight = SPECIAL + "weight"
    if weight not in tensors:
        return None
    regions = 1 + measure(path, tensors, re.escape(weight))
    grid = grid_size_of(path, image_size)
    config = infer_config(path, tensors, grid, num_heads, PARConfig, regions=regions)
    return build(path, tensors, PARForCausalLM, config, partial(renamed, (*OWN_RENAMES, *RENAMES)))
