"""Official files of LlamaGen and its kin: the sizes that they tell, and the model that is made of one."""

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

__all__ = ["build", "check_size", "config_of", "grid_size_of", "heads_of", "renamed"]

STRIDE = 16  # pixels per token side, in every published transformer
# tables of the official class, and parts of ControlAR's that no forward reads
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
    """The model of that kind and config with the tensors of a file; several own tensors may share a source.

    Raises:
        CheckpointError: keys or shapes are others.
    """
    if config.num_hidden_layers > len(tensors):
        allowed = f"{config.num_hidden_layers} layers, as its config says; it holds {len(tensors)} tensors"
        raise CheckpointError("checkpoint", str(path), allowed)
    return official_files.build(path, tensors, partial(kind, config), source_name, NOT_NEEDED)


def renamed(renames: Iterable[tuple[str, str]], name: str) -> str:
    """The official name of a weight: patterns are replaced one after the other."""
    for pattern, replacement in renames:
        name = re.sub(pattern, replacement, name)
    return name


def config_of(path: Path, kind: type[LlamaGenConfig], **settings: Any) -> LlamaGenConfig:
    """A config of that kind; raises CheckpointError if such sizes cannot be."""
    try:
        return kind(**settings)
    except StrictDataclassError as error:
        reason = str(error).splitlines()[-1].strip()
        raise CheckpointError("checkpoint", str(path), f"sizes of such a model ({reason})") from error


def heads_of(path: Path, depth: int, width: int, given: int | None) -> int:
    """Attention heads: those given, or of the published size; raises if there is none, or they do not fit."""
    published = (size.heads for size in SIZES.values() if (size.layers, size.width) == (depth, width))
    heads = next(published, None) if given is None else given
    if heads is None:
        allowed = f"a published size; {depth} layers of width {width} are none: say num_heads (--heads)"
        raise CheckpointError("checkpoint", str(path), allowed)
    if heads < 1 or width % (4 * heads):
        raise InputError("num_heads", heads, f"heads of a multiple of 4 dimensions that divide {width}")
    return heads


def check_size(image_size: int | None, grid: int) -> None:
    """Raise InputError for a size that contradicts the grid of a file."""
    if image_size not in (None, STRIDE * grid):
        allowed = f"{STRIDE * grid}, which this checkpoint was trained for"
        raise InputError("image_size", image_size, allowed)


def grid_size_of(path: Path, image_size: int | None) -> int:
    """Tokens per side, from the file name and from what the caller says."""
    match = re.search(r"_(256|384|512)(?!\d)", path.stem)
    named = int(match[1]) if match else None
    if image_size is None and named is None:
        allowed = "the pixels per side that it was trained for (--image-size): the file name does not say"
        raise InputError("image_size", None, allowed)
    if image_size is not None and named is not None and image_size != named:
        raise InputError("image_size", image_size, f"{named}, which this checkpoint was trained for")
    size = image_size if image_size is not None else named or 0
    if size < STRIDE or size % STRIDE:
        raise InputError("image_size", size, f"a multiple of {STRIDE}")
    return size // STRIDE
