"""Parts of a trained LlamaGen of captions that a model begun with it keeps, and how such a model is saved."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import AutoTokenizer, T5EncoderModel

from mmspec.errors import InputError
from mmspec.families.image_parts import TEXT_ENCODER, TOKENIZER, VQ, load_vq
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.models.autoencoders import encode_image
from mmspec.training.record import save_trained
from mmspec.training.run import Training
from reference.image import READER
from reference.image_data import ImageBatch
from reference.trainer import finish, float8_matrices

__all__ = ["Kept", "evenly_spread", "shape_of", "trained_llamagen"]

#: Fields of a config that a model has of the one that it begins with.
SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("grid_size", "condition_type", "num_classes", "caption_length", "caption_dim", "rope_base"),
    "rms_norm_eps",
)


def trained_llamagen(folder: Path, layers: int = 1, argument: str = "layers") -> LlamaGenForCausalLM:
    """Load a LlamaGen of captions, from which so many layers are taken over.

    Raises:
        InputError: it is conditioned on something else, or has fewer layers.
    """
    trained: LlamaGenForCausalLM = LlamaGenForCausalLM.from_pretrained(folder, dtype=torch.float32)
    config = trained.config
    if config.condition_type != "caption":
        raise InputError("from", str(folder), "must be a LlamaGen of captions")
    if not 1 <= layers <= config.num_hidden_layers:
        raise InputError(
            argument, layers, f"must be between 1 and {config.num_hidden_layers}, the layers of {folder}"
        )
    return trained


def shape_of(trained: LlamaGenForCausalLM) -> dict[str, Any]:
    """The settings that the config of a model has of the LlamaGen that it begins with."""
    return {name: getattr(trained.config, name) for name in SHARED}


def evenly_spread(layers: int, depth: int) -> list[int]:
    """Choose some of `depth` layers, the first and the last among them if there are two or more."""
    return [round(place) for place in np.linspace(0, depth - 1, layers)]


class Kept:
    """The text encoder, tokenizers and reader of a LlamaGen of captions, which stay as they are.

    Args:
        folder: of the LlamaGen.
        device: of the image tokenizer.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.vq = load_vq(str(folder), folder / VQ).requires_grad_(False).to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
        self.text_encoder = T5EncoderModel.from_pretrained(folder / TEXT_ENCODER, dtype=torch.float32)

    def with_tokens(self, batch: ImageBatch) -> ImageBatch:
        """Give a batch the tokens [B, N] of its images, or of the frames of its clips one after another."""
        batch = batch.to(self.vq.device)
        tokens = encode_image(self.vq, batch.pixels).reshape(len(batch.class_labels), -1)
        return replace(batch, tokens=tokens)

    def finish(
        self,
        training: Training,
        model: Any,
        out: Path,
        command: str,
        options: Mapping[str, Any],
        within: str = ".layers.",
        program: str = "python -m reference",
    ) -> Path:
        """Save a trained model with these parts beside it, matrices of `within` in float8; see `finish`."""

        def save(record: dict[str, Any]) -> None:
            save_trained(model, out, record, weights=float8_matrices(model, within))
            self.share(out)

        options = {"from": self.folder, **options, **training.length}
        return finish(training, out, save, command=command, options=options, model=model, program=program)

    def share(self, out: Path) -> None:
        """Put the parts beside a model: as links, if both folders lie side by side."""
        for part in (TEXT_ENCODER, TOKENIZER, VQ, READER):
            source, place = self.folder / part, out / part
            if not source.is_dir() or place.exists():
                continue
            if out.resolve().parent == self.folder.resolve().parent:
                os.symlink(Path("..") / self.folder.resolve().name / part, place)
            else:
                shutil.copytree(source, place)
