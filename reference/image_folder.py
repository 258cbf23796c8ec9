"""Saving of a reference image model as one folder: transformer, text encoder, tokenizer, VQ and reader.

The transformer lies in the folder itself, the rest in subfolders, each as its own library writes it.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

from transformers import PreTrainedTokenizerFast, T5EncoderModel

from mmspec.models.image_parts import TEXT_ENCODER, TOKENIZER, VQ
from mmspec.models.llamagen import LlamaGenForCausalLM
from mmspec.training.record import save_trained

__all__ = ["save_image_model"]

READER = "reader"


def save_image_model(
    transformer: LlamaGenForCausalLM,
    text_encoder: T5EncoderModel | None,
    tokenizer: PreTrainedTokenizerFast | None,
    folder: Path,
    training: dict[str, Any],
    *,
    vq: str | Path,
    reader: str | Path | None = None,
) -> None:
    """Save everything that an image needs: half precision on disk, single in memory.

    Args:
        transformer: its generation settings hold the default guidance scale, temperature and top-k.
        text_encoder, tokenizer: None where the condition is a class.
        folder: to write.
        training: goes to `training.json`.
        vq, reader: folders that are copied into it.
    """
    save_trained(transformer, folder, training)
    if text_encoder is not None and tokenizer is not None:
        save_trained(text_encoder, folder / TEXT_ENCODER)
        tokenizer.save_pretrained(folder / TOKENIZER)
    shutil.copytree(vq, folder / VQ, dirs_exist_ok=True)
    if reader is not None:
        shutil.copytree(reader, folder / READER, dirs_exist_ok=True)
