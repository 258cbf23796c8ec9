"""Image tokenizers and autoencoders of diffusers, built from official files.

Most official files use the weight names of taming-transformers (2012.09841) and latent diffusion
(2112.10752): Chameleon and Emu3.5 (`VQModel`), MAR's KL-16 and NextStep-1 (`AutoencoderKL`), and VAR.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vq_model import VQModel
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor
from torch.nn.functional import normalize

from mmspec.models.checkpoint import check_source, load_checked
from mmspec.models.official_files import build, measure
from mmspec.open_types import Keywords

Autoencoder = TypeVar("Autoencoder", bound=ModelMixin)

CODEBOOK = "quantize.embedding.weight"
# usage statistics, and the discriminator and averaged weights of training files
NOT_NEEDED = r"quantize\.(codebook_used|ema_vocab_hit_SV)|loss\..*|model_ema\..*"

# diffusers' name of a part -> the published one, in both layouts
RENAMES = (
    (r"\.group_norm\.", ".norm."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".proj_out."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"\.conv_norm_out\.", ".norm_out."),
)
# of latent diffusion alone, which numbers the decoder levels in the opposite direction
LDM_RENAMES = (
    (r"\.down_blocks\.", ".down."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.attentions\.0\.", ".mid.attn_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.resnets\.", ".block."),
    (r"\.attentions\.", ".attn."),
)


def autoencoder_from_ldm(
    path: Path, tensors: Mapping[str, Tensor], scaling_factor: float, shift_factor: float | None = None
) -> AutoencoderKL:
    """Build the autoencoder of a latent diffusion state dict, with sizes measured from its shapes.

    Image tokens are (latents - shift_factor) * scaling_factor.
    """
    levels = measure_levels(path, tensors)
    settings = {
        **level_settings(levels),
        "up_block_types": ("UpDecoderBlock2D",) * len(levels.widths),  # decoder levels have no attention
        "latent_channels": measure(path, tensors, r"decoder\.conv_in\.weight", axis=1),
        "use_quant_conv": any(name.startswith("quant_conv.") for name in tensors),
        "use_post_quant_conv": any(name.startswith("post_quant_conv.") for name in tensors),
        "scaling_factor": scaling_factor,
        "shift_factor": shift_factor,
    }
    vae: AutoencoderKL = build_autoencoder(AutoencoderKL, settings, path, tensors)
    return vae


def load_autoencoder(source: str | Path) -> AutoencoderKL:
    """Load an autoencoder from a folder of diffusers, in single precision.

    Raises:
        CheckpointError: there is none, or weights are missing, unused, or not finite.
    """
    name = check_source(source, "vae")
    loaded: AutoencoderKL = load_checked(AutoencoderKL, name, "vae", "autoencoder", torch_dtype=torch.float32)
    return loaded.requires_grad_(False)


def build_autoencoder(
    model_class: type[Autoencoder],
    settings: Keywords,
    path: Path,
    tensors: Mapping[str, Tensor],
    source_name: Callable[[str], str] | None = None,
) -> Autoencoder:
    """Build an autoencoder of diffusers with published weights, frozen.

    `source_name` returns the published name of each weight; None for the names of latent diffusion.
    """
    name_of = source_name or partial(ldm_name, levels=len(settings["block_out_channels"]))
    made = build(path, tensors, partial(model_class, **settings), name_of, NOT_NEEDED, ldm_shape)
    return made.requires_grad_(False)


def ldm_name(name: str, levels: int) -> str:
    """Latent diffusion's name of a weight of diffusers, for an autoencoder with that many levels."""
    for pattern, replacement in (*LDM_RENAMES, *RENAMES):
        name = re.sub(pattern, replacement, name)
    return re.sub(
        r"^decoder\.up_blocks\.(\d+)", lambda match: f"decoder.up.{levels - 1 - int(match[1])}", name
    )


def ldm_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The published shape: attention projections are 1x1 convolutions there and linear in diffusers."""
    is_projection = re.search(r"\.(attn(_1|\.\d+)|mid\.1)\.(q|k|v|proj_out)\.weight$", name)
    return (*shape, 1, 1) if is_projection else shape


def measure_widths(path: Path, tensors: Mapping[str, Tensor], place: str, blocks: str) -> list[int]:
    """Channels of each encoder level; `place` and `blocks` are name patterns of a level and its blocks."""
    levels = [int(match[1]) for name in tensors if (match := re.match(rf"{place}\.(\d+)\.", name))]
    return [
        measure(path, tensors, rf"{blocks.format(level)}\.\d+\.conv\d\.(weight|bias)")
        for level in range(1 + max(levels, default=0))
    ]


class Levels(NamedTuple):
    """Levels of an encoder: the channels of each, whether each has attention, and the blocks of each."""

    widths: list[int]
    attends: list[bool]
    blocks: int


def measure_levels(path: Path, tensors: Mapping[str, Tensor]) -> Levels:
    """Read the levels of an encoder in latent diffusion's layout from the shapes of its tensors."""
    widths = measure_widths(path, tensors, r"encoder\.down", r"encoder\.down\.{}\.block")
    attends = [
        any(name.startswith(f"encoder.down.{level}.attn.") for name in tensors)
        for level in range(len(widths))
    ]
    blocks = [
        int(match[1]) for name in tensors if (match := re.match(r"encoder\.down\.0\.block\.(\d+)\.", name))
    ]
    return Levels(widths, attends, 1 + max(blocks, default=0))


def level_settings(levels: Levels) -> Keywords:
    """Arguments of diffusers' autoencoders; the decoder has attention at the same levels as the encoder."""
    return {
        "down_block_types": tuple(f"{'Attn' * there}DownEncoderBlock2D" for there in levels.attends),
        "up_block_types": tuple(f"{'Attn' * there}UpDecoderBlock2D" for there in reversed(levels.attends)),
        "block_out_channels": tuple(levels.widths),
        "layers_per_block": levels.blocks,
    }


def vq_settings(path: Path, tensors: Mapping[str, Tensor], levels: Levels | None = None) -> Keywords:
    """Return the arguments of `VQModel`; levels of None are read by `measure_levels`."""
    return {
        **level_settings(levels or measure_levels(path, tensors)),
        "latent_channels": measure(path, tensors, r"(encoder\.conv_out|post_quant_conv)\.(weight|bias)"),
        "num_vq_embeddings": measure(path, tensors, re.escape(CODEBOOK)),
        "vq_embed_dim": measure(path, tensors, r"quant_conv\.(weight|bias)"),
    }


@torch.no_grad()
def encode_image(vq: VQModel, pixels: Tensor) -> Tensor:
    """Encode images [B, 3, H, W] in [-1, 1] to tokens [B, H / stride, W / stride], the nearest by angle."""
    latents = normalize(vq.encode(pixels).latents, dim=1)
    rows, _, height, width = latents.shape
    indices: Tensor = vq.quantize(latents)[2][2]
    return indices.reshape(rows, height, width)


@torch.no_grad()
def decode_tokens(vq: VQModel, tokens: Tensor) -> Tensor:
    """Decode token grids [B, rows, columns] to images [B, 3, H, W], in about [-1, 1]."""
    quantizer: Any = vq.quantize
    shape = (*tokens.shape, quantizer.vq_embed_dim)
    latents = quantizer.get_codebook_entry(tokens.flatten(), shape)
    pixels: Tensor = vq.decode(latents, force_not_quantize=True).sample
    return pixels
