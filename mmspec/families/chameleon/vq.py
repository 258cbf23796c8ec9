"""The image tokenizers of Chameleon and Emu3.5, in the layout of taming-transformers (2012.09841).

They stand in Meta's `vqgan.ckpt` and, behind `model.vqmodel.`, in checkpoints that draw, such as Anole.
Chameleon's is tested on random files, against the encoder of transformers and another decoder; not on the
published weights.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusers.models.autoencoders.vq_model import VQModel
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers.utils.hub import cached_file

from mmspec.errors import CheckpointError
from mmspec.families.image_parts import VQ, ModelSource, check_parts, load_vq, load_whole
from mmspec.models.autoencoders import build_autoencoder, ldm_name, measure_levels, vq_settings
from mmspec.models.official_files import find_tensors, open_checkpoint
from mmspec.open_types import Keywords

__all__ = ["load_chameleon", "load_chameleon_tokenizer", "load_chameleon_vq", "vq_from_taming"]

PREFIX = "model.vqmodel."


def load_chameleon(found: ModelSource) -> Keywords:
    """Load a model and its image tokenizer; see `Family`."""
    check_parts(found, VQ)
    loaded = load_whole(found._replace(parts={}))
    # the tokenizer may lie among the weights of the model, which are here by now
    return {**loaded, "vq": load_chameleon_tokenizer(found.source, found.parts.get(VQ), **found.where)}


def load_chameleon_tokenizer(source: str, vq: str | Path | None = None, **where: Any) -> VQModel:
    """The image tokenizer of a Chameleon, in single precision.

    It is in a subfolder of the model's or among its weights (Anole), or in `vq`: Meta's `vqgan.ckpt`, a
    folder of such weights, or one of diffusers.

    Raises:
        CheckpointError: there is none with a decoder, or it is damaged.
    """
    place = Path(source if vq is None else vq)
    saved = place / VQ if vq is None else place
    if (saved / SAFETENSORS_WEIGHTS_NAME).is_file():
        loaded: VQModel = load_vq(source, vq, **where)
        return loaded
    if vq is None and not place.is_dir():  # a hub id, whose files are in the cache
        place = Path(str(cached_file(source, "config.json", **where))).parent
    model: VQModel = load_chameleon_vq(place).float().eval()
    return model


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
