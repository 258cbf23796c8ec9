"""Opening the parts of an image model: tokenizer of images, code vectors, text encoder.

They lie in subfolders of the transformer's folder, or where the caller says.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from diffusers.utils.constants import SAFETENSORS_WEIGHTS_NAME
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase, T5EncoderModel
from transformers.utils.hub import cached_file

from mmspec.errors import CheckpointError
from mmspec.families.chameleon.vq import load_chameleon_vq
from mmspec.families.llamagen import LlamaGenConfig
from mmspec.families.llamagen.conversion import RAW_CODEBOOK_FILE
from mmspec.families.var.tokenizer import ScaleVQModel
from mmspec.models.checkpoint import (
    check_source,
    check_vocabulary,
    first_line,
    load_checked,
)

VQ, TEXT_ENCODER, TOKENIZER = "vq", "text_encoder", "tokenizer"


def load_vq(source: str, vq: str | Path | None = None, scales: bool = False, **where: Any) -> Any:
    """The image tokenizer, in single precision: of the folder `vq` if there is one, else a subfolder.

    Args:
        source, vq, where: the model's folder or hub id; the tokenizer's; and keywords of transformers.
        scales: whether it is one of several scales, a `ScaleVQModel`, and no `VQModel`.

    Raises:
        CheckpointError: there is none, or weights are missing, surplus, of another shape, or not finite.
    """
    folder, where = part_of(source, VQ, vq, where)
    where.pop("trust_remote_code", None)
    kind = ScaleVQModel if scales else VQModel
    return load_checked(kind, folder, VQ, "image tokenizer", torch_dtype=torch.float32, **where)


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


def load_codebook(source: str, vq: str | Path | None = None, **where: Any) -> Tensor | None:
    """[K, d] the code vectors as they were trained, where the image tokenizer keeps them beside itself."""
    folder, where = part_of(source, VQ, vq, where)
    try:
        path = cached_file(folder, RAW_CODEBOOK_FILE, _raise_exceptions_for_missing_entries=False, **where)
        return None if path is None else load_file(path)["codebook"]
    except (OSError, KeyError, SafetensorError) as error:
        raise CheckpointError(VQ, folder, f"no usable {RAW_CODEBOOK_FILE}: {first_line(error)}") from error


def load_text_encoder(
    source: str,
    config: LlamaGenConfig,
    text_encoder: str | Path | None = None,
    dtype: torch.dtype | str = "auto",
    **where: Any,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The T5 encoder of captions and its tokenizer: of one folder or hub id, else of two subfolders.

    Raises:
        CheckpointError: one of them is missing or damaged, or they do not fit the model or each other.
    """
    folder, inside = part_of(source, TEXT_ENCODER, text_encoder, where)
    words = where if text_encoder is not None else {**where, "subfolder": TOKENIZER}
    model = load_checked(T5EncoderModel, folder, TEXT_ENCODER, "T5 encoder", dtype=dtype, **inside)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **words)
    except Exception as error:  # the same for its files
        raise CheckpointError(TEXT_ENCODER, folder, f"no usable T5 encoder: {first_line(error)}") from error
    if model.config.d_model != config.caption_dim:
        allowed = f"an encoder of width {config.caption_dim}, with which the model was trained"
        raise CheckpointError(TEXT_ENCODER, f"width {model.config.d_model}", allowed)
    check_vocabulary(tokenizer, model)
    return model, tokenizer


def part_of(
    source: str, name: str, given: str | Path | None, where: dict[str, Any]
) -> tuple[str, dict[str, Any]]:
    """Locate a part of a checkpoint: its folder or hub id, and the keywords of transformers."""
    if given is not None:
        return check_source(given, name), where
    if Path(source).is_dir() and not (Path(source) / name).is_dir():
        allowed = f"a checkpoint with the subfolder {name!r}; or say where it lies: {name}=..."
        raise CheckpointError(name, source, allowed)
    return source, {**where, "subfolder": name}
