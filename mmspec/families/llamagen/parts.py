"""Opening a LlamaGen with its parts: image tokenizer, code vectors, text encoder."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import (
    AutoTokenizer,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    T5EncoderModel,
)
from transformers.utils.hub import cached_file

from mmspec.errors import CheckpointError
from mmspec.families.image_parts import (
    RAW_CODEBOOK_FILE,
    TEXT_ENCODER,
    TOKENIZER,
    VQ,
    ModelSource,
    check_parts,
    load_vq,
    part_of,
)
from mmspec.models.checkpoint import check_vocabulary, first_line, load_checked, load_model
from mmspec.open_types import Keywords
from mmspec.plugins import family_of, load
from mmspec.targets.image_tokens import ImageTokenTarget

__all__ = ["load_codebook", "load_llamagen", "load_reader", "load_text_encoder"]


def load_llamagen(found: ModelSource) -> Keywords:
    """Load a model and its parts; see `Family`. A model of classes has no text encoder."""
    source, config, parts, where, how, _ = found
    is_captioned = config.condition_type == "caption"
    check_parts(found, VQ, *[TEXT_ENCODER] * is_captioned)
    kind = load(getattr(family_of(config), VQ))
    loaded: Keywords = {
        "vq": load_vq(source, parts.get(VQ), kind, **where),
        "codebook": load_codebook(source, parts.get(VQ), **where),
    }
    if is_captioned:
        loaded["text_encoder"], loaded["processor"] = load_text_encoder(
            source, config, parts.get(TEXT_ENCODER), how.get("dtype", "auto"), **where
        )
    return {**loaded, "model": load_model(source, config, surplus_allowed=False, **where, **how)}


def load_reader(folder: Path, target: ImageTokenTarget) -> Keywords:
    """Load what reads captions in training, frozen: `tokenizer` and `text_encoder`; nothing for classes."""
    if target.classes is not None:
        return {}
    encoder, tokenizer = load_text_encoder(str(folder), target.config, dtype=torch.float32)
    nn.Module.to(encoder.eval().requires_grad_(False), target.device)
    return {"tokenizer": tokenizer, "text_encoder": encoder}


def load_codebook(source: str, vq: str | Path | None = None, **where: object) -> Tensor | None:
    """[K, d] the code vectors as they were trained, where the image tokenizer keeps them beside itself."""
    folder, where = part_of(source, VQ, vq, where)
    try:
        path = cached_file(folder, RAW_CODEBOOK_FILE, _raise_exceptions_for_missing_entries=False, **where)
        return None if path is None else load_file(path)["codebook"]
    except (OSError, KeyError, SafetensorError) as error:
        raise CheckpointError(VQ, folder, f"no usable {RAW_CODEBOOK_FILE}: {first_line(error)}") from error


def load_text_encoder(
    source: str,
    config: PreTrainedConfig,
    text_encoder: str | Path | None = None,
    dtype: torch.dtype | str = "auto",
    **where: object,
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
