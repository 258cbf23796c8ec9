"""Loading of NextStep-1: published folders, and those of `save_pretrained`, without remote code."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from mmspec.errors import CheckpointError, UnsupportedModelError
from mmspec.families.image_parts import ModelSource
from mmspec.families.nextstep.modeling import IMAGE_AREA, NextStepConfig, NextStepForImageGeneration
from mmspec.models.autoencoders import autoencoder_from_ldm, load_autoencoder
from mmspec.models.checkpoint import first_line, load_checked, read_index
from mmspec.models.official_files import (
    INDEX,
    count,
    find_file,
    find_tensors,
    measure,
    open_checkpoint,
    read_config,
)
from mmspec.open_types import Json, Keywords

__all__ = ["load_nextstep", "load_nextstep_tokenizer", "load_nextstep_vae"]

WEIGHTS, VAE_WEIGHTS = "model.safetensors", "checkpoint.pt"
VAE = "vae"
# names in the config of NextStep-1.1 -> names here
LATER_NAMES = {
    "image_size": "latent_size",
    "patch_size": "latent_patch_size",
    "num_channels": "latent_channels",
}
SCALING_FACTOR, SHIFT_FACTOR = 0.3611, 0.1159  # defaults, if the tokenizer's config has none


def load_parts(found: ModelSource) -> Keywords:
    """Load a model, its tokenizer, and its autoencoder if it has one; see `Family`."""
    folder, parts = Path(found.source), found.parts
    model, tokenizer = load_nextstep(folder, **found.how), load_nextstep_tokenizer(folder)
    has_vae = VAE in parts or (folder / VAE).is_dir()
    return {
        "model": model,
        "processor": tokenizer,
        "vae": load_nextstep_vae(parts.get(VAE, folder)) if has_vae else None,
    }


def load_nextstep(source: str | Path, **where: Any) -> NextStepForImageGeneration:
    """Load the model of a folder, in eval mode.

    The published config names remote code (`auto_map`), which is not run.

    Args:
        source: a folder with a config.json and safetensors, sharded or not.
        where: passed on to transformers, such as `dtype` and `device_map`.

    Raises:
        CheckpointError: it is not such a folder, or keys are missing or unknown, have wrong shapes, or are
            not finite.
        UnsupportedModelError: the config has rotations by rows and columns.
    """
    folder = Path(source)
    model: NextStepForImageGeneration = load_checked(
        NextStepForImageGeneration, str(folder), "model", config=_config(folder), **where
    )
    return model


def load_nextstep_tokenizer(source: str | Path) -> PreTrainedTokenizerBase:
    """Load the text tokenizer."""
    try:
        tokenizer: PreTrainedTokenizerBase = AutoTokenizer.from_pretrained(str(source))
    except Exception as error:  # the files of a tokenizer can raise anything inside transformers
        rule = f"cannot be loaded: {first_line(error)}"
        raise CheckpointError("tokenizer", str(source), rule) from error
    if IMAGE_AREA not in tokenizer.get_vocab():
        raise CheckpointError("tokenizer", str(source), f"must have the token {IMAGE_AREA}")
    return tokenizer


def load_nextstep_vae(source: str | Path) -> AutoencoderKL:
    """Load the image tokenizer of a folder or its subfolder vae, published or of diffusers, in float32.

    The decoder is complete. The encoder lacks the normalisation of latents after it, which published configs
    with `encoder_norm` have.

    Raises:
        CheckpointError: there is none, or keys are missing or unknown, or have wrong shapes.
    """
    folder = Path(source)
    if (folder / "vae").is_dir():
        folder /= "vae"
    if not (folder / VAE_WEIGHTS).is_file():
        return load_autoencoder(folder)
    path = folder / VAE_WEIGHTS
    settings = read_config(folder)
    vae: AutoencoderKL = autoencoder_from_ldm(
        path,
        find_tensors(path, open_checkpoint(path)),
        scaling_factor=settings.get("scaling_factor", SCALING_FACTOR),
        shift_factor=settings.get("shift_factor", SHIFT_FACTOR),
    ).float()
    return vae


def _config(folder: Path) -> NextStepConfig:
    """The stored config; missing sizes are measured from the weights."""
    stored, tensors = read_config(folder), _stored_shapes(folder)
    if stored.get("model_type") != NextStepConfig.model_type:
        rule = f"must have a config of model type {NextStepConfig.model_type!r}"
        raise CheckpointError("model", str(folder), rule)
    if stored.get("use_2d_rope"):
        raise UnsupportedModelError(
            "NextStep with use_2d_rope rotates by rows and columns, which is not supported"
        )
    stored.pop("auto_map", None)
    stored |= {own: stored[theirs] for theirs, own in LATER_NAMES.items() if theirs in stored}
    for name, read in SIZES.items():
        if stored.get(name) is None:
            stored[name] = read(folder, tensors, stored)
    if stored.get("use_gen_pos_embed") and not stored["gen_pos_grid"]:
        raise CheckpointError("model", str(folder), "has missing keys: gen_pos_embed, which its config uses")
    if stored.get("num_attention_heads") is None:
        rule = "needs num_attention_heads in its config, since the shapes do not have it"
        raise CheckpointError("model", str(folder), rule)
    try:
        return NextStepConfig.from_dict(stored)
    except Exception as error:  # for values that transformers or this class rejects
        raise CheckpointError("model", str(folder), f"has no usable config: {first_line(error)}") from error


#: Measures a size from a folder, its weights and its config.
Reader = Callable[[Path, Mapping[str, Tensor], Json], int]


def _size(pattern: str) -> Reader:
    return lambda folder, tensors, stored: measure(folder, tensors, pattern)


def _count(pattern: str) -> Reader:
    return lambda folder, tensors, stored: count(tensors, pattern)


def _has(pattern: str) -> Reader:
    return lambda folder, tensors, stored: any(re.fullmatch(pattern, name) for name in tensors)


def _channels(folder: Path, tensors: Mapping[str, Tensor], stored: Json) -> int:
    size = measure(folder, tensors, r"image_in_projector\.weight", axis=1)
    patch = stored.get("latent_patch_size") or NextStepConfig.latent_patch_size
    return size // int(patch) ** 2


def _places(folder: Path, tensors: Mapping[str, Tensor], stored: Json) -> int:
    table = tensors.get("gen_pos_embed")
    return 0 if table is None else math.isqrt(table.shape[1])


#: Readers of the sizes that a config may lack.
SIZES: dict[str, Reader] = {
    "vocab_size": _size(r"embed_tokens\.weight"),
    "hidden_size": _size(r"(layers\.\d+\.input_layernorm|norm)\.weight"),
    "intermediate_size": _size(r"layers\.\d+\.mlp\.(gate|up)_proj\.weight"),
    "num_hidden_layers": _count(r"layers\.(\d+)\."),
    "attention_bias": _has(r"layers\.\d+\.self_attn\.q_proj\.bias"),
    "o_attention_bias": _has(r"layers\.\d+\.self_attn\.o_proj\.bias"),
    "mlp_bias": _has(r"layers\.\d+\.mlp\.gate_proj\.bias"),
    "latent_channels": _channels,
    "fm_head_dim": _size(r"image_head\.net\.input_proj\.weight"),
    "fm_head_layers": _count(r"image_head\.net\.res_blocks\.(\d+)\."),
    "gen_pos_grid": _places,
}


def _stored_shapes(folder: Path) -> dict[str, Tensor]:
    """Empty tensors with the names and shapes in the headers of a folder's files."""
    path = find_file(folder, [WEIGHTS]) or folder / WEIGHTS
    names = {*read_index(path).values()} if path.name.endswith(INDEX) else {path.name}
    tensors = {}
    for path in (folder / name for name in sorted(names)):
        try:
            with safe_open(path, framework="pt") as content:
                for key in content.keys():  # noqa: SIM118
                    tensors[key] = torch.empty(
                        content.get_slice(key).get_shape(), dtype=torch.float32, device="meta"
                    )
        except (OSError, SafetensorError) as error:
            rule = f"must be a complete safetensors file ({error})"
            raise CheckpointError("model", str(path), rule) from error
    return tensors
