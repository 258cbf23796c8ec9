"""Parts of a trained LlamaGen of captions that a model trained from it reuses, and saving of that model."""

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

#: Config fields that a model copies from the model that it starts from.
SHARED = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_attention_heads", "num_key_value_heads"),
    *("grid_size", "condition_type", "num_classes", "caption_length", "caption_dim", "rope_base"),
    "rms_norm_eps",
)


def trained_llamagen(folder: Path, layers: int = 1, argument: str = "layers") -> LlamaGenForCausalLM:
    """Load a LlamaGen of captions that has at least `layers` layers.

    Raises:
        InputError: the model is not conditioned on captions, or has fewer layers.
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
    """Return the config settings that a model copies from the LlamaGen that it starts from."""
    return {name: getattr(trained.config, name) for name in SHARED}


def evenly_spread(layers: int, depth: int) -> list[int]:
    """Choose `layers` of `depth` layers, evenly spread from the first to the last; the first if it is one."""
    return [round(place) for place in np.linspace(0, depth - 1, layers)]


class Kept:
    """The frozen text encoder, tokenizers and reader of a LlamaGen of captions.

    Args:
        folder: folder of the LlamaGen.
        device: device of the image tokenizer.
    """

    def __init__(self, folder: Path, device: torch.device) -> None:
        self.folder = folder
        self.vq = load_vq(str(folder), folder / VQ).requires_grad_(False).to(device)
        self.tokenizer = AutoTokenizer.from_pretrained(folder / TOKENIZER)
        self.text_encoder = T5EncoderModel.from_pretrained(folder / TEXT_ENCODER, dtype=torch.float32)

    def with_tokens(self, batch: ImageBatch) -> ImageBatch:
        """Return the batch with the tokens [B, N] of its images, or of the joined frames of its clips."""
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
        """Save a trained model beside these parts, with the matrices of `within` in float8.

        `within` is an argument of `float8_matrices`; for the others see `reference.trainer.finish`.
        """

        def save(record: dict[str, Any]) -> None:
            save_trained(model, out, record, weights=float8_matrices(model, within))
            self.share(out)

        options = {"from": self.folder, **options, **training.length}
        return finish(training, out, save, command=command, options=options, model=model, program=program)

    def share(self, out: Path) -> None:
        """Add the parts to the folder of a model: as links beside the original folder, else as copies."""
        for part in (TEXT_ENCODER, TOKENIZER, VQ, READER):
            source, place = self.folder / part, out / part
            if not source.is_dir() or place.exists():
                continue
            if out.resolve().parent == self.folder.resolve().parent:
                os.symlink(Path("..") / self.folder.resolve().name / part, place)
            else:
                shutil.copytree(source, place)
