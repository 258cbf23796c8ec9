"""Loading and conversion of MAR: official pickles and autoencoders, and converted folders.

Sizes are read from the shapes; the number of heads, which is not in the shapes, is looked up by the width.
"""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from mmspec.atomic_file import new_folder
from mmspec.errors import CheckpointError, InputError
from mmspec.families.image_parts import ModelSource
from mmspec.families.mar.modeling import SIZES, MARConfig, MARForImageGeneration
from mmspec.models.checkpoint import AnyModel, load_checked
from mmspec.models.official_files import build, count, find_tensors, measure, open_checkpoint
from mmspec.open_types import Json, Keywords

if TYPE_CHECKING:  # importing diffusers takes seconds, and the model does not need it
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

__all__ = ["convert_mar", "is_mar", "load_parts", "mar_from_official"]

logger = logging.getLogger(__name__)

AVERAGED, TRAINED = "model_ema", ("model", "state_dict")
OFFICIAL_FILE = "checkpoint-last.pth"
OWN_KEY = "diffusion_pos_embed_learned"  # no other model has this key
VAE = "vae"
SCALING_FACTOR = 0.2325  # of KL-16: latents times this factor have about unit variance


def convert_mar(
    checkpoint: str | Path,
    out: str | Path,
    *,
    vae: str | Path | None = None,
    num_heads: int | None = None,
    dtype: torch.dtype | None = None,
) -> Json:
    """Convert an official MAR and its image tokenizer to a safetensors folder.

    Args:
        checkpoint: the official file, or the folder that contains it.
        out: folder to write; it appears complete or not at all. The tokenizer is in its subfolder vae.
        vae: the official `kl16.ckpt`, or a folder of diffusers; None to write no tokenizer.
        num_heads: attention heads, if the width is not that of a published size.
        dtype: number format of MAR's weights; None keeps the file's.

    Returns:
        What was written: `path`, `kind`, `parameters`, `dtype`, `grid_size`.

    Raises:
        CheckpointError: a file is damaged, or its keys or shapes are not those of such a model.
        InputError: an argument is missing, or contradicts the file.
    """
    model: AnyModel = _open_official(_official_file(Path(checkpoint)), num_heads)
    tokenizer = _open_vae(vae)
    if dtype is not None:
        model.to(dtype)
    with new_folder(Path(out)) as folder:
        model.save_pretrained(folder)
        if tokenizer is not None:
            tokenizer.save_pretrained(folder / VAE)
    return {
        "path": str(out),
        "kind": MARConfig.model_type,
        "grid_size": model.config.grid_size,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "dtype": str(model.dtype).removeprefix("torch."),
    }


def is_mar(checkpoint: str | Path) -> bool:
    """True for an official file of MAR, or the folder that contains it.

    Raises:
        CheckpointError: the file is damaged, or needs code.
    """
    path = _official_file(Path(checkpoint))
    if not path.is_file():
        return False
    content = open_checkpoint(path)
    parts = [content, *(content[name] for name in (AVERAGED, *TRAINED) if name in content)]
    return any(isinstance(part, Mapping) and OWN_KEY in part for part in parts)


def load_parts(found: ModelSource) -> Keywords:
    """Load a model, and its autoencoder if it has one; see `Family`."""
    inside = Path(found.source) / VAE
    return {
        "model": load_checked(MARForImageGeneration, found.source, "model", **found.how),
        VAE: _open_vae(found.parts.get(VAE, inside if inside.is_dir() else None)),
    }


def mar_from_official(
    path: Path, tensors: Mapping[str, Tensor], num_heads: int | None = None
) -> MARForImageGeneration:
    """Build the model of an official state dict; `path` names the file in messages, and must fit the size."""
    config = _infer_config(path, tensors, num_heads)
    return build(path, tensors, partial(MARForImageGeneration, config), lambda name: name)


def _open_official(path: Path, num_heads: int | None) -> MARForImageGeneration:
    """Build the model of an official file, with its averaged weights if it has any."""
    content = open_checkpoint(path)
    if AVERAGED not in content:
        if any(name in content for name in TRAINED):
            logger.warning("%s has no %s; weights that are not averaged draw worse images", path, AVERAGED)
        else:
            logger.warning("it is unknown whether the weights in %s are averaged (EMA)", path)
    return mar_from_official(path, find_tensors(path, content, (AVERAGED, *TRAINED)), num_heads)


def _official_file(path: Path) -> Path:
    return path / OFFICIAL_FILE if path.is_dir() else path


def _open_vae(source: str | Path | None) -> AutoencoderKL | None:
    if source is None:
        return None
    from mmspec.models.autoencoders import autoencoder_from_ldm, load_autoencoder

    path = Path(source)
    if path.is_dir():
        return load_autoencoder(path)
    tensors = find_tensors(path, open_checkpoint(path), TRAINED)
    vae: AutoencoderKL = autoencoder_from_ldm(path, tensors, SCALING_FACTOR).float()
    return vae


def _infer_config(path: Path, tensors: Mapping[str, Tensor], num_heads: int | None) -> MARConfig:
    width = measure(path, tensors, r"z_proj\.weight|(encoder|decoder)_norm\.weight")
    cells = measure(path, tensors, r"diffusion_pos_embed_learned", axis=1)
    places = measure(path, tensors, r"(encoder|decoder)_pos_embed_learned", axis=1)
    inner = measure(path, tensors, r"(encoder|decoder)_blocks\.\d+\.mlp\.fc1\.weight")
    side = math.isqrt(cells)
    if side**2 != cells or places < cells:
        rule = f"must have a square image; its shapes have {cells} image places of {places}"
        raise CheckpointError("checkpoint", str(path), rule)
    _check_name(path, width)
    heads = num_heads if num_heads is not None else _published_heads(path, width)
    if heads < 1 or width % heads:
        raise InputError("num_heads", heads, f"must be a divisor of the width {width}")
    return MARConfig(
        hidden_size=width,
        encoder_layers=count(tensors, r"encoder_blocks\.(\d+)\."),
        decoder_layers=count(tensors, r"decoder_blocks\.(\d+)\."),
        num_attention_heads=heads,
        mlp_ratio=inner / width,
        token_size=measure(path, tensors, r"z_proj\.weight", axis=1),
        grid_size=side,
        buffer_size=places - cells,
        num_classes=measure(path, tensors, r"class_emb\.weight"),
        head_width=measure(path, tensors, r"diffloss\.net\.(input_proj|cond_embed)\.weight"),
        head_depth=count(tensors, r"diffloss\.net\.res_blocks\.(\d+)\."),
    )


def _check_name(path: Path, width: int) -> None:
    """Raise CheckpointError if the file or folder is named after another published size."""
    for name, size in SIZES.items():
        if re.search(name.replace("_", "[_-]"), f"{path.parent.name}/{path.name}") and size.width != width:
            rule = f"must have the width {size.width} of its name; it has {width}"
            raise CheckpointError("checkpoint", str(path), rule)


def _published_heads(path: Path, width: int) -> int:
    for size in SIZES.values():
        if size.width == width:
            return size.heads
    rule = f"has the width {width}, which is not that of a published size; pass num_heads"
    raise CheckpointError("checkpoint", str(path), rule)
