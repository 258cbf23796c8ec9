"""Image tokenizers of Chameleon and Emu3.5 in diffusers' `VQModel`.

Transformers has Chameleon's encoder, but no decoder.

The layout is that of taming-transformers (2012.09841), in Meta's `vqgan.ckpt` and, behind `model.vqmodel.`,
in checkpoints that draw (Anole). Tested on random files in that layout, against transformers' encoder and an
independent decoder; not on the published weights.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.models.autoencoders.vq_model import VQModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmspec.errors import CheckpointError
from mmspec.models.ldm_layout import build_from_ldm
from mmspec.models.official_files import find_tensors, measure, open_checkpoint

__all__ = ["load_chameleon_vq", "vq_from_taming"]

PREFIX = "model.vqmodel."
CODEBOOK = "quantize.embedding.weight"
NOT_NEEDED = r"loss\..*"  # the discriminator of a training file


def load_chameleon_vq(path: str | Path) -> VQModel:
    """The image tokenizer of a file or folder.

    Args:
        path: Meta's `vqgan.ckpt`, or a folder of safetensors that holds the tokenizer with its decoder.

    Raises:
        CheckpointError: there is none, or keys are missing, unknown, or of another shape.
    """
    path = Path(path)
    if path.is_dir():
        return vq_from_taming(path, _read_shards(path))
    tensors = find_tensors(path, open_checkpoint(path), ("state_dict",))
    inner = {n.removeprefix(PREFIX): tensor for n, tensor in tensors.items() if n.startswith(PREFIX)}
    return vq_from_taming(path, inner or tensors)


def vq_from_taming(path: Path, tensors: Mapping[str, Tensor]) -> VQModel:
    """The tokenizer of a state dict; `path` names the file in messages.

    Raises:
        CheckpointError: keys are missing, unknown, or of another shape.
    """
    vq: VQModel = build_from_ldm(VQModel, _settings(path, tensors), path, tensors, NOT_NEEDED)
    return vq


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """The tensors behind `model.vqmodel.` in a folder's safetensors files."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as content:
                names = [name for name in content.keys() if name.startswith(PREFIX)]  # noqa: SIM118
                tensors.update({name.removeprefix(PREFIX): content.get_tensor(name) for name in names})
        except (OSError, SafetensorError) as error:
            raise CheckpointError("vq", str(file), f"a complete safetensors file ({error})") from error
    if not tensors:
        raise CheckpointError("vq", str(folder), f"a folder whose safetensors files hold {PREFIX}*")
    return tensors


def _settings(path: Path, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Arguments of `VQModel`, read from names and shapes; the middle attends, and levels may."""
    levels = [int(match[1]) for name in tensors if (match := re.match(r"encoder\.down\.(\d+)\.", name))]
    blocks = [
        int(match[1]) for name in tensors if (match := re.match(r"encoder\.down\.0\.block\.(\d+)", name))
    ]
    widths = [
        measure(path, tensors, rf"encoder\.down\.{level}\.block\.\d+\.conv\d\.(weight|bias)")
        for level in range(1 + max(levels, default=0))
    ]
    attends = [f"encoder.down.{level}.attn.0.q.weight" in tensors for level in range(len(widths))]
    return {
        "down_block_types": tuple(f"{'Attn' * there}DownEncoderBlock2D" for there in attends),
        "up_block_types": tuple(f"{'Attn' * there}UpDecoderBlock2D" for there in reversed(attends)),
        "block_out_channels": tuple(widths),
        "layers_per_block": 1 + max(blocks, default=0),
        "latent_channels": measure(path, tensors, r"(encoder\.conv_out|post_quant_conv)\.(weight|bias)"),
        "num_vq_embeddings": measure(path, tensors, re.escape(CODEBOOK)),
        "vq_embed_dim": measure(path, tensors, r"quant_conv\.(weight|bias)"),
    }
