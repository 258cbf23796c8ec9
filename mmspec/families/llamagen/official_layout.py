"""Official files of LlamaGen and related models: their sizes, and the model that is built from a file."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import Tensor

from mmspec.errors import CheckpointError, InputError
from mmspec.families.llamagen.configuration import SIZES, LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.models import official_files
from mmspec.models.checkpoint import first_line

__all__ = ["build", "check_size", "config_of", "grid_size_of", "heads_of", "renamed"]

STRIDE = 16  # pixels per token side, in every published transformer
# tables of the official class, and parts of ControlAR's that no forward pass reads
NOT_NEEDED = (
    r"freqs_cis|causal_mask|.*\.kv_cache\..*|condition_embeddings\.weight|condition_norm\.weight"
    r"|condition_mlp\.uncond_embedding|lvl_1L|attn_bias_for_masking"
)


def build(
    path: Path,
    tensors: Mapping[str, Tensor],
    kind: type[LlamaGenForCausalLM],
    config: LlamaGenConfig,
    source_name: Callable[[str], str],
) -> LlamaGenForCausalLM:
    """Build a model with the tensors of a file; several own tensors may share an official one.

    Raises:
        CheckpointError: keys or shapes differ from the model's.
    """
    if config.num_hidden_layers > len(tensors):
        rule = f"must have the {config.num_hidden_layers} layers of its config; it has {len(tensors)} tensors"
        raise CheckpointError("checkpoint", str(path), rule)
    return official_files.build(path, tensors, partial(kind, config), source_name, NOT_NEEDED)


def renamed(renames: Iterable[tuple[str, str]], name: str) -> str:
    """The official name of a weight, by pattern replacements in sequence."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def config_of(path: Path, kind: type[LlamaGenConfig], **settings: Any) -> LlamaGenConfig:
    """Make a config; raises CheckpointError for impossible sizes."""
    try:
        return kind(**settings)
    except StrictDataclassError as error:
        rule = f"has impossible sizes: {first_line(error)}"
        raise CheckpointError("checkpoint", str(path), rule) from error


def heads_of(path: Path, depth: int, width: int, given: int | None) -> int:
    """Number of attention heads: `given`, or that of the published size; raises if it is unknown or wrong."""
    published = (size.heads for size in SIZES.values() if (size.layers, size.width) == (depth, width))
    heads = next(published, None) if given is None else given
    if heads is None:
        rule = f"has {depth} layers of width {width}, which is not a published size; pass num_heads (--heads)"
        raise CheckpointError("checkpoint", str(path), rule)
    if heads < 1 or width % (4 * heads):
        rule = f"must divide the width {width} into heads whose width is a multiple of 4"
        raise InputError("num_heads", heads, rule)
    return heads


def check_size(image_size: int | None, grid: int) -> None:
    """Raise InputError for an image size that contradicts the grid of a file."""
    if image_size not in (None, STRIDE * grid):
        rule = f"must be {STRIDE * grid}, which this checkpoint was trained for"
        raise InputError("image_size", image_size, rule)


def grid_size_of(path: Path, image_size: int | None) -> int:
    """Tokens per side, from the file name or the caller's image size."""
    match = re.search(r"_(256|384|512)(?!\d)", path.stem)
    named = int(match[1]) if match else None
    if image_size is None and named is None:
        rule = "must be the pixels per side of training (--image-size), which the file name lacks"
        raise InputError("image_size", None, rule)
    if image_size is not None and named is not None and image_size != named:
        rule = f"must be {named}, which this checkpoint was trained for"
        raise InputError("image_size", image_size, rule)
    size = image_size if image_size is not None else named or 0
    if size < STRIDE or size % STRIDE:
        raise InputError("image_size", size, f"must be a multiple of {STRIDE}")
    return size // STRIDE
