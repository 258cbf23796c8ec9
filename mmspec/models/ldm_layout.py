"""Names of autoencoders in taming-transformers (2012.09841) and latent diffusion, for those of diffusers."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from mmspec.models.official_files import check_layout

__all__ = ["build_from_ldm", "ldm_name", "ldm_shape"]

# diffusers' name of a part -> the published one, whose decoder levels run the other way
RENAMES = (
    (r"\.down_blocks\.(\d+)\.resnets\.", r".down.\1.block."),
    (r"\.down_blocks\.(\d+)\.attentions\.", r".down.\1.attn."),
    (r"\.down_blocks\.(\d+)\.downsamplers\.0\.", r".down.\1.downsample."),
    (r"\.mid_block\.resnets\.0\.", ".mid.block_1."),
    (r"\.mid_block\.attentions\.0\.", ".mid.attn_1."),
    (r"\.mid_block\.resnets\.1\.", ".mid.block_2."),
    (r"\.group_norm\.", ".norm."),
    (r"\.to_([qkv])\.", r".\1."),
    (r"\.to_out\.0\.", ".proj_out."),
    (r"\.conv_shortcut\.", ".nin_shortcut."),
    (r"\.conv_norm_out\.", ".norm_out."),
)


def build_from_ldm(
    model_class: type[Any], settings: Mapping[str, Any], path: Path, tensors: Mapping[str, Tensor], spare: str
) -> Any:
    """Build an autoencoder of diffusers with the weights of a state dict in the published layout.

    Args:
        model_class: `VQModel` or `AutoencoderKL`.
        settings: its arguments, `block_out_channels` among them.
        path: names the file in messages.
        tensors: by their published names.
        spare: pattern of names that are not needed.

    Raises:
        CheckpointError: keys are missing, unknown, or of another shape.
    """
    levels = len(settings["block_out_channels"])
    with torch.device("meta"):
        model = model_class(**settings)
    sources = {name: ldm_name(name, levels) for name in model.state_dict()}
    shapes = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    expected = {sources[name]: ldm_shape(sources[name], shape) for name, shape in shapes.items()}
    check_layout(path, tensors, expected, spare)
    own = {name: tensors[source].reshape(shapes[name]).clone() for name, source in sources.items()}
    model.load_state_dict(own, assign=True)
    return model.eval().requires_grad_(False)


def ldm_name(name: str, levels: int) -> str:
    """The published name of a weight that diffusers calls so, of an autoencoder with so many levels."""
    for pattern, replacement in RENAMES:
        name = re.sub(pattern, replacement, name)
    if match := re.match(r"decoder\.up_blocks\.(\d+)\.(.*)", name):
        rest = match[2].replace("resnets.", "block.").replace("attentions.", "attn.")
        rest = rest.replace("upsamplers.0.", "upsample.")
        name = f"decoder.up.{levels - 1 - int(match[1])}.{rest}"
    return name


def ldm_shape(name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The published shape: attention projections are 1x1 convolutions there, linear layers in diffusers."""
    is_projection = re.search(r"\.attn(_1|\.\d+)\.(q|k|v|proj_out)\.weight$", name)
    return (*shape, 1, 1) if is_projection else shape
