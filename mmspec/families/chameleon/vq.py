"""Image tokenizers of Chameleon and Emu3.5, in the layout of taming-transformers (2012.09841).

Meta's `vqgan.ckpt` holds Chameleon's, as do checkpoints that draw images, such as Anole, under the prefix
`model.vqmodel.`. Chameleon's is tested on random files, against the encoder of transformers and an
independent decoder, not on the published weights.
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
from mmspec.models.autoencoders import build_autoencoder, vq_settings
from mmspec.models.official_files import find_tensors, open_checkpoint
from mmspec.open_types import Keywords

__all__ = ["load_chameleon", "load_chameleon_tokenizer", "load_chameleon_vq", "vq_from_taming"]

PREFIX = "model.vqmodel."


def load_chameleon(found: ModelSource) -> Keywords:
    """Load a model and its image tokenizer; see `Family`."""
    check_parts(found, VQ)
    loaded = load_whole(found._replace(parts={}))
    # the tokenizer may be among the model's weights, which are downloaded by now
    return {**loaded, "vq": load_chameleon_tokenizer(found.source, found.parts.get(VQ), **found.where)}


def load_chameleon_tokenizer(source: str, vq: str | Path | None = None, **where: Any) -> VQModel:
    """Load the image tokenizer of a Chameleon, in single precision.

    Args:
        source: the model's folder or hub id; the tokenizer is in a subfolder or among the weights (Anole).
        vq: another place of the tokenizer: Meta's `vqgan.ckpt`, a folder of such weights, or of diffusers.
        where: keywords of transformers.

    Raises:
        CheckpointError: there is none with a decoder, or it is damaged.
    """
    place = Path(source if vq is None else vq)
    saved = place / VQ if vq is None else place
    if (saved / SAFETENSORS_WEIGHTS_NAME).is_file():
        loaded: VQModel = load_vq(source, vq, **where)
        return loaded
    if vq is None and not place.is_dir():  # the files of a hub id are in the cache
        place = Path(str(cached_file(source, "config.json", **where))).parent
    model: VQModel = load_chameleon_vq(place).float().eval()
    return model


def load_chameleon_vq(path: str | Path) -> VQModel:
    """Load the image tokenizer of a file or folder.

    Args:
        path: Meta's `vqgan.ckpt`, or a folder of safetensors with the tokenizer and its decoder.

    Raises:
        CheckpointError: there is none, or keys are missing, unknown, or have wrong shapes.
    """
    path = Path(path)
    if path.is_dir():
        return vq_from_taming(path, _read_shards(path))
    tensors = find_tensors(path, open_checkpoint(path), ("state_dict",))
    inner = {n.removeprefix(PREFIX): tensor for n, tensor in tensors.items() if n.startswith(PREFIX)}
    return vq_from_taming(path, inner or tensors)


def vq_from_taming(path: Path, tensors: Mapping[str, Tensor]) -> VQModel:
    """Build the tokenizer of a state dict of Chameleon; `path` names the file in messages."""
    vq: VQModel = build_autoencoder(VQModel, vq_settings(path, tensors), path, tensors)
    return vq


def _read_shards(folder: Path) -> dict[str, Tensor]:
    """The tensors under `model.vqmodel.` in a folder's safetensors files, without this prefix."""
    tensors = {}
    for file in sorted(folder.glob("*.safetensors")):
        try:
            with safe_open(file, framework="pt") as content:
                names = [name for name in content.keys() if name.startswith(PREFIX)]  # noqa: SIM118
                tensors.update({name.removeprefix(PREFIX): content.get_tensor(name) for name in names})
        except (OSError, SafetensorError) as error:
            raise CheckpointError(
                "vq", str(file), f"must be a complete safetensors file ({error})"
            ) from error
    if not tensors:
        raise CheckpointError("vq", str(folder), f"must be a folder whose safetensors files hold {PREFIX}*")
    return tensors
