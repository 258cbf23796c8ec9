"""The image tokenizer of LlamaGen (2406.06525), built from the official file.

It is a `VQModel` whose codebook the official code normalises on every use. Here the codebook is stored
normalised, so that diffusers' unchanged class gives the same indices and images.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from diffusers.models.autoencoders.vq_model import VQModel
from torch import Tensor
from torch.nn.functional import normalize

from mmspec.models.autoencoders import (
    CODEBOOK,
    RENAMES,
    Levels,
    build_autoencoder,
    measure_widths,
    vq_settings,
)

__all__ = ["is_vq", "vq_from_official"]

# diffusers' name of a part -> the published one; decoder blocks are in the same order, the lowest first
VQ_RENAMES = (
    (r"\.(?:down|up)_blocks\.", ".conv_blocks."),
    (r"\.mid_block\.resnets\.0\.", ".mid.0."),
    (r"\.mid_block\.attentions\.0\.", ".mid.1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.2."),
    (r"\.resnets\.", ".res."),
    (r"\.attentions\.", ".attn."),
)


def is_vq(tensors: Mapping[str, Tensor]) -> bool:
    """True if these are the weights of an image tokenizer of LlamaGen."""
    return any(name.startswith(("encoder.conv_blocks.", "decoder.conv_blocks.")) for name in tensors)


def vq_from_official(path: Path, tensors: Mapping[str, Tensor]) -> tuple[VQModel, Tensor]:
    """Build the tokenizer of a state dict; return it and the unnormalised codebook [entries, width]."""
    widths = measure_widths(path, tensors, r"\w+\.conv_blocks", r"encoder\.conv_blocks\.{}\.res")
    attends = [level == len(widths) - 1 for level in range(len(widths))]  # the last level alone
    settings = vq_settings(path, tensors, Levels(widths, attends, 2))
    vq: VQModel = build_autoencoder(VQModel, settings, path, tensors, vq_name)
    codebook = tensors[CODEBOOK].clone()
    vq.load_state_dict({CODEBOOK: normalize(codebook.double(), dim=-1).to(codebook.dtype)}, strict=False)
    return vq, codebook


def vq_name(name: str) -> str:
    """LlamaGen's name of a weight of diffusers."""
    for pattern, replacement in (*VQ_RENAMES, *RENAMES):
        name = re.sub(pattern, replacement, name)
    return name
