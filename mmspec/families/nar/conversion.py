"""Models of official NAR checkpoints, in LlamaGen's layout with a second head."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path

from torch import Tensor

from mmspec.families.llamagen.conversion import RENAMES, infer_config
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.families.llamagen.official_layout import build, grid_size_of, renamed
from mmspec.families.nar.modeling import NARConfig, NARForCausalLM

SECOND_NORM = "medusa_norm.weight"
# the part of a name -> the official one
OWN_RENAMES = (
    (r"^lm_head\.right\.", "output."),
    (r"^lm_head\.below\.", "medusa_output."),
    (r"^model\.below_norm\.", "medusa_norm."),
)


def nar_from_official(
    path: Path, tensors: Mapping[str, Tensor], image_size: int | None, num_heads: int | None
) -> LlamaGenForCausalLM | None:
    """The NAR of an official state dict; None of another."""
    if SECOND_NORM not in tensors:
        return None
    # it has one layer more than the model's size says
    grid = grid_size_of(path, image_size)
    config = infer_config(path, tensors, grid, num_heads, NARConfig, further_layers=1)
    return build(path, tensors, NARForCausalLM, config, partial(renamed, (*OWN_RENAMES, *RENAMES)))
