"""LlamaGen's image tokenizers in the class that diffusers has for them, `VQModel`.

The official files keep the codebook as it was trained and normalise its rows on every use; here they are
stored normalised, with which the same indices and images come out of the class as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from torch import Tensor
from torch.nn.functional import normalize

from mmspec.models.official_files import check_layout, measure

__all__ = ["decode_tokens", "encode_image", "is_vq", "vq_from_official"]

CODEBOOK = "quantize.embedding.weight"
NOT_NEEDED = r"quantize\.codebook_used|loss\..*"  # usage statistics; the discriminator of a training file

# diffusers' name of a part -> the official one; decoder blocks are in the same order, lowest resolution first
RENAMES = (
    (r"\.(?:down|up)_blocks\.", ".conv_blocks."),
    (r"\.mid_block\.resnets\.0\.", ".mid.0."),
    (r"\.mid_block\.attentions\.0\.", ".mid.1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.2."),
    (r"\.resnets\.", ".res."),
    (r"\.attentions\.", ".attn."),
    (r"\.group_norm\.", ".norm."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".proj_out."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.downsamplers\.0\.", ".downsample."),
    (r"\.upsamplers\.0\.", ".upsample."),
    (r"\.conv_norm_out\.", ".norm_out."),
)


def is_vq(tensors: Mapping[str, Tensor]) -> bool:
    """True if this is an image tokenizer."""
    return any(name.startswith(("encoder.conv_blocks.", "decoder.conv_blocks.")) for name in tensors)


def vq_from_official(path: Path, tensors: Mapping[str, Tensor]) -> tuple[VQModel, Tensor]:
    """The tokenizer of an official state dict.

    Returns:
        The model, and the codebook [entries, width] as it was trained: distances between its rows are not
        those between normalised ones.

    Raises:
        CheckpointError: keys are missing, unknown, or of another shape.
    """
    with torch.device("meta"):
        vq = VQModel(**_settings(path, tensors))
    sources = {name: _official_name(name) for name in vq.state_dict()}
    shapes = {name: tuple(tensor.shape) for name, tensor in vq.state_dict().items()}
    expected = {sources[name]: _official_shape(sources[name], shape) for name, shape in shapes.items()}
    check_layout(path, tensors, expected, NOT_NEEDED)
    codebook = tensors[CODEBOOK].clone()
    own = {name: tensors[source].reshape(shapes[name]).clone() for name, source in sources.items()}
    own[CODEBOOK] = normalize(codebook.double(), dim=-1).to(codebook.dtype)
    vq.load_state_dict(own, assign=True)
    return vq.eval(), codebook


def _settings(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of `VQModel`, read from the shapes; only the last level attends."""
    levels = [int(match[1]) for name in tensors if (match := re.match(r"\w+\.conv_blocks\.(\d+)\.", name))]
    widths = [
        measure(path, tensors, rf"encoder\.conv_blocks\.{level}\.res\.\d+\.conv\d\.(weight|bias)")
        for level in range(1 + max(levels, default=0))
    ]
    plain = len(widths) - 1
    return {
        "down_block_types": ("DownEncoderBlock2D",) * plain + ("AttnDownEncoderBlock2D",),
        "up_block_types": ("AttnUpDecoderBlock2D",) + ("UpDecoderBlock2D",) * plain,
        "block_out_channels": tuple(widths),
        "layers_per_block": 2,
        "latent_channels": measure(path, tensors, r"(encoder\.conv_out|post_quant_conv)\.(weight|bias)"),
        "num_vq_embeddings": measure(path, tensors, re.escape(CODEBOOK)),
        "vq_embed_dim": measure(path, tensors, r"quant_conv\.(weight|bias)"),
    }


def _official_name(name: str) -> str:
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    return name


def _official_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Attention projections are 1x1 convolutions in official files, linear layers in diffusers."""
    is_projection = re.search(r"\.(attn\.\d+|mid\.1)\.(q|k|v|proj_out)\.weight$", name)
    return (*shape, 1, 1) if is_projection else shape


@torch.no_grad()
def encode_image(vq: VQModel, pixels: Tensor) -> Tensor:
    """Tokens [B, H / stride, W / stride] of images [B, 3, H, W] in [-1, 1]: the nearest by angle."""
    latents = normalize(vq.encode(pixels).latents, dim=1)
    rows, _, height, width = latents.shape
    indices: Tensor = vq.quantize(latents)[2][2]
    return indices.reshape(rows, height, width)


@torch.no_grad()
def decode_tokens(vq: VQModel, tokens: Tensor) -> Tensor:
    """Images [B, 3, H, W], about [-1, 1], of token grids [B, rows, columns]."""
    quantizer: Any = vq.quantize
    shape = (*tokens.shape, quantizer.vq_embed_dim)
    latents = quantizer.get_codebook_entry(tokens.flatten(), shape)
    pixels: Tensor = vq.decode(latents, force_not_quantize=True).sample
    return pixels
