"""The image tokenizers of Chameleon and Emu3.5, in the layout of taming-transformers (2012.09841).

They stand in Meta's `vqgan.ckpt` and, behind `model.vqmodel.`, in checkpoints that draw, such as Anole.
Chameleon's is tested on random files, against the encoder of transformers and another decoder; not on the
published weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from diffusers.models.autoencoders.vq_model import VQModel
from safetensors import SafetensorError, safe_open
from torch import Tensor

from mmspec.errors import CheckpointError
from mmspec.models.autoencoders import build_autoencoder, ldm_name, measure_levels, vq_settings
from mmspec.models.official_files import find_tensors, open_checkpoint

__all__ = ["load_chameleon_vq", "vq_from_taming"]

PREFIX = "model.vqmodel."


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
    """The tokenizer of a state dict of Chameleon; `path` names the file in messages."""
    widths, attends, layers = measure_levels(path, tensors)
    settings = vq_settings(path, tensors, widths, attends) | {"layers_per_block": layers}
    vq: VQModel = build_autoencoder(
        VQModel, settings, path, tensors, lambda name: ldm_name(name, len(widths))
    )
    return vq.requires_grad_(False)


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
