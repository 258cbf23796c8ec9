"""Loading of a LlamaGen with its parts: image tokenizer, code vectors and text encoder."""

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

from mmspec.errors import CheckpointError, InputError
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
from mmspec.families.llamagen.modeling import caption_prompt, class_prompt, null_caption_prompt
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.models.checkpoint import check_vocabulary, first_line, load_checked, load_model
from mmspec.open_types import Keywords, Processor
from mmspec.plugins import family_of, load
from mmspec.targets.causal import to_device
from mmspec.targets.image_tokens import ImageTokenTarget

__all__ = ["PromptReader", "load_codebook", "load_llamagen", "load_reader", "load_text_encoder"]


def load_llamagen(found: ModelSource) -> Keywords:
    """Load a model and its parts; see `Family`. A class-conditional model has no text encoder."""
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
    """Load the frozen `tokenizer` and `text_encoder` for training; empty for a class-conditional model."""
    if target.classes is not None:
        return {}
    encoder, tokenizer = load_text_encoder(str(folder), target.config, dtype=torch.float32)
    nn.Module.to(encoder.eval().requires_grad_(False), target.device)
    return {"tokenizer": tokenizer, "text_encoder": encoder}


class PromptReader:
    """Encodes captions or class labels for the training of heads; see `Family`.

    Args:
        folder: folder of the model, with its text encoder in a subfolder.
        target: the frozen target.

    Attributes:
        tokenizer: tokenizer of captions; None for a class-conditional model.
    """

    def __init__(self, folder: Path, target: LlamaGenTarget) -> None:
        read = load_reader(folder, target)
        self.target = target
        self.tokenizer: Processor = read.get("tokenizer")
        self._text_encoder: PreTrainedModel | None = read.get("text_encoder")

    @torch.no_grad()
    def inputs(self, asked: Tensor | int, *, dropped: bool = False) -> dict[str, Tensor]:
        """Return prompt inputs of a caption's tokens [n] or a label, or of its null prompt if `dropped`."""
        model, device = self.target.model, self.target.device
        if isinstance(asked, int):
            return to_device(class_prompt(model.config, [None if dropped else asked]), device)
        if dropped:
            return to_device(null_caption_prompt(model, len(asked)), device)
        if self._text_encoder is None:
            raise InputError("prompt", "a caption", "must be a class: the target is conditioned on classes")
        features = self._text_encoder(asked[None].to(device)).last_hidden_state
        return caption_prompt(model.config, features)


def load_codebook(source: str, vq: str | Path | None = None, **where: object) -> Tensor | None:
    """Load the unnormalised code vectors [K, d] beside the image tokenizer; None if it has none."""
    folder, where = part_of(source, VQ, vq, where)
    try:
        path = cached_file(folder, RAW_CODEBOOK_FILE, _raise_exceptions_for_missing_entries=False, **where)
        return None if path is None else load_file(path)["codebook"]
    except (OSError, KeyError, SafetensorError) as error:
        rule = f"has no usable {RAW_CODEBOOK_FILE}: {first_line(error)}"
        raise CheckpointError(VQ, folder, rule) from error


def load_text_encoder(
    source: str,
    config: PreTrainedConfig,
    text_encoder: str | Path | None = None,
    dtype: torch.dtype | str = "auto",
    **where: object,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the T5 encoder of captions and its tokenizer.

    Args:
        source: folder or hub id of the model, with both in subfolders.
        config: config of the model.
        text_encoder: another folder or hub id with both; None for the subfolders.
        dtype: number format of the encoder.
        where: keywords of transformers.

    Raises:
        CheckpointError: one of them is missing or damaged, or they do not fit the model or each other.
    """
    folder, inside = part_of(source, TEXT_ENCODER, text_encoder, where)
    words = where if text_encoder is not None else {**where, "subfolder": TOKENIZER}
    model = load_checked(T5EncoderModel, folder, TEXT_ENCODER, "T5 encoder", dtype=dtype, **inside)
    try:
        tokenizer = AutoTokenizer.from_pretrained(folder, **words)
    except Exception as error:  # its files can raise anything inside transformers
        rule = f"has no usable T5 encoder: {first_line(error)}"
        raise CheckpointError(TEXT_ENCODER, folder, rule) from error
    if model.config.d_model != config.caption_dim:
        rule = f"must have the width {config.caption_dim} that the model was trained with"
        raise CheckpointError(TEXT_ENCODER, f"width {model.config.d_model}", rule)
    check_vocabulary(tokenizer, model)
    return model, tokenizer
