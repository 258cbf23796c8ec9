"""KL autoencoders in the layout of latent diffusion (2112.10752), as diffusers' `AutoencoderKL`.

MAR's KL-16 and NextStep-1's tokenizer, which is that of FLUX trained anew, are published so.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from mmspec.models.checkpoint import check_source, load_diffusers_model
from mmspec.models.ldm_layout import build_from_ldm
from mmspec.models.official_files import measure

__all__ = ["autoencoder_from_ldm", "load_autoencoder"]

NOT_NEEDED = r"loss\..*|model_ema\..*"  # the discriminator of a training file, and its averages


def autoencoder_from_ldm(
    path: Path, tensors: Mapping[str, Tensor], scaling_factor: float, shift_factor: float | None = None
) -> AutoencoderKL:
    """The autoencoder of a state dict, its sizes read from the shapes.

    Args:
        path: names the file in messages.
        tensors: by their published names.
        scaling_factor, shift_factor: tokens are (latents - shift) * scaling.

    Raises:
        CheckpointError: keys are missing, unknown, or of another shape.
    """
    settings = _settings(path, tensors) | {"scaling_factor": scaling_factor, "shift_factor": shift_factor}
    vae: AutoencoderKL = build_from_ldm(AutoencoderKL, settings, path, tensors, NOT_NEEDED)
    return vae


def load_autoencoder(source: str | Path, argument: str = "vae", **where: Any) -> AutoencoderKL:
    """The autoencoder of a folder of diffusers, in single precision.

    Raises:
        CheckpointError: there is none, or weights are missing, surplus, or not finite.
    """
    name = check_source(source, argument)
    loaded: AutoencoderKL = load_diffusers_model(AutoencoderKL, name, argument, "autoencoder", **where)
    return loaded.requires_grad_(False)


def _settings(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of `AutoencoderKL`; levels of the encoder may attend, those of the decoder do not."""
    levels = [int(match[1]) for name in tensors if (match := re.match(r"encoder\.down\.(\d+)\.", name))]
    blocks = [
        int(match[1]) for name in tensors if (match := re.match(r"encoder\.down\.0\.block\.(\d+)\.", name))
    ]
    widths = [
        measure(path, tensors, rf"encoder\.down\.{level}\.block\.\d+\.conv\d\.(weight|bias)")
        for level in range(1 + max(levels, default=0))
    ]
    attends = [
        any(name.startswith(f"encoder.down.{level}.attn.") for name in tensors)
        for level in range(len(widths))
    ]
    return {
        "down_block_types": tuple(
            "AttnDownEncoderBlock2D" if attending else "DownEncoderBlock2D" for attending in attends
        ),
        "up_block_types": ("UpDecoderBlock2D",) * len(widths),
        "block_out_channels": tuple(widths),
        "layers_per_block": 1 + max(blocks, default=0),
        "latent_channels": measure(path, tensors, r"decoder\.conv_in\.weight", axis=1),
        "use_quant_conv": any(name.startswith("quant_conv.") for name in tensors),
        "use_post_quant_conv": any(name.startswith("post_quant_conv.") for name in tensors),
    }
