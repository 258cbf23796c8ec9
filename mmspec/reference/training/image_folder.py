"""Writes a reference image model as one folder: transformer, text encoder, tokenizer, VQ and reader.

The transformer lies in the folder itself, the rest in subfolders, each as its own library writes it.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.vq_model import VQModel
from transformers import PreTrainedModel, PreTrainedTokenizerFast, T5EncoderModel

from mmspec.errors import CheckpointError
from mmspec.models.llamagen import LlamaGenForCausalLM
from mmspec.reference.training.vlm_folder import half_precision

__all__ = ["load_vq", "save_image_model"]

VQ, TEXT_ENCODER, TOKENIZER, READER = "vq", "text_encoder", "tokenizer", "reader"


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
    _save(transformer, folder)
    if text_encoder is not None and tokenizer is not None:
        _save(text_encoder, folder / TEXT_ENCODER)
        tokenizer.save_pretrained(folder / TOKENIZER)
    shutil.copytree(vq, folder / VQ, dirs_exist_ok=True)
    if reader is not None:
        shutil.copytree(reader, folder / READER, dirs_exist_ok=True)
    (folder / "training.json").write_text(json.dumps(training, indent=2) + "\n")


def load_vq(folder: str | Path) -> VQModel:
    """A trained tokenizer in single precision.

    Raises:
        CheckpointError: there is none in the folder.
    """
    try:
        vq: VQModel = VQModel.from_pretrained(folder, torch_dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError("vq", str(folder), "a folder that `mmspec train vq` wrote") from error
    return vq.eval().requires_grad_(False)


def _save(model: PreTrainedModel, folder: Path) -> None:
    model.save_pretrained(folder, state_dict=half_precision(model))
    # transformers loads in the dtype that config.json names; half precision is many times slower on a CPU.
    path = folder / "config.json"
    config = json.loads(path.read_text())
    config["dtype"] = "float32"
    path.write_text(json.dumps(config, indent=2) + "\n")
