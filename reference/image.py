"""Training of the reference image models: a LlamaGen over the tokens of scenes, given a prompt or a class.

The text encoder is trained with it. Every batch has new scenes. A prompt describes all or part of a scene.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.models.autoencoders.vq_model import VQModel
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from mmspec.errors import CheckpointError
from mmspec.families.image_parts import TEXT_ENCODER, TOKENIZER, VQ, load_vq
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.models.autoencoders import encode_image
from mmspec.registry import require_known
from mmspec.scenes.reader import load_reader
from mmspec.training.record import save_trained, taken_over
from mmspec.training.run import RunOptions, Training, flush_subnormals
from reference.image_data import GRID, IMAGE_SIZE, ImageBatch, image_batch
from reference.image_model import (
    SHAPES_BY_SIZE,
    ImageLoss,
    build_caption_tokenizer,
    build_text_encoder,
    build_transformer,
)
from reference.trainer import finish, train_on_scenes

__all__ = [
    "save_image_model",
    "take_weights",
    "train_image",
]

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
    """Save all parts that generation needs in one folder, in half precision.

    Args:
        transformer: the model; its generation settings contain the default guidance scale, temperature and
            top-k.
        text_encoder, tokenizer: None if the condition is a class.
        folder: the folder to write.
        training: the record to write to `training.json`.
        vq, reader: folders to copy into it.
    """
    save_trained(transformer, folder, training)
    if text_encoder is not None and tokenizer is not None:
        save_trained(text_encoder, folder / TEXT_ENCODER)
        tokenizer.save_pretrained(folder / TOKENIZER)
    shutil.copytree(vq, folder / VQ, dirs_exist_ok=True)
    if reader is not None:
        shutil.copytree(reader, folder / READER, dirs_exist_ok=True)


def take_weights(learner: ImageLoss, folder: Path) -> None:
    """Load the weights of a trained model of the same size and condition."""
    trained = LlamaGenForCausalLM.from_pretrained(folder, dtype=torch.float32)
    learner.transformer.load_state_dict(trained.state_dict())
    if learner.text_encoder is not None:
        encoder = T5EncoderModel.from_pretrained(folder / TEXT_ENCODER, dtype=torch.float32)
        learner.text_encoder.load_state_dict(encoder.state_dict())
        learner.null_embedding.data.copy_(trained.model.cls_embedding.uncond_embedding)


CONDITIONS = ("caption", "class")
CHECK_SCENES = 32
DEFAULT_MINUTES = 75.0
STAGE = 9
FINE_TUNING_FACTOR = 0.5
PROMPTS_PER_IMAGE = 7  # the text encoder learns from prompts without images, which cost almost nothing


@flush_subnormals()
def train_image(
    out: str | Path,
    vq: str | Path,
    *,
    reader: str | Path | None = None,
    condition: str = "caption",
    start: str | Path | None = None,
    size: str = "base",
    **how: Unpack[RunOptions],
) -> Path:
    """Train a reference image model and save it as one folder (see `save_image_model`).

    Args:
        out: the folder to write.
        vq: a trained image tokenizer. It is frozen and copied into the folder.
        reader: a trained reader to copy into the folder for evaluation; the training does not use it.
        condition: "caption", or "class" (colour and shape of the leftmost object, 48 labels).
        start: a trained image model of the same condition to start from, instead of random weights.
        size: "base", "long" (32 x 32 tokens) or "tiny" (for tests).
        how: see `RunOptions`; by default 75 minutes, with 16 images per step and process.

    Returns:
        The folder. Its `training.json` records the training.

    Raises:
        InputError: the size or condition is unknown.
        CheckpointError: a folder cannot be read, or the image tokenizer does not fit the size.
    """
    require_known("size", size, SHAPES_BY_SIZE)
    require_known("condition", condition, CONDITIONS)
    out, vq = Path(out), Path(vq)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16)
    device = training.accelerator.device
    images = load_vq(str(vq), vq).requires_grad_(False).to(device)
    if reader is not None:
        load_reader(reader)  # raises before the training if the folder is not a reader
    shape = SHAPES_BY_SIZE[size]
    _check_vq(vq, images, shape.entries)
    tokenizer = build_caption_tokenizer()
    transformer = build_transformer(shape, condition)
    text_encoder = build_text_encoder(shape, tokenizer) if condition == "caption" else None
    learner = ImageLoss(transformer, text_encoder)
    rule = "a model of the same size and condition that `python -m reference train image` wrote"
    before = taken_over(start, rule, partial(take_weights, learner))
    only_prompts = 0 if text_encoder is None else PROMPTS_PER_IMAGE * training.batch_size

    def batch_of(seeds: np.ndarray, **which: Any) -> ImageBatch:
        batch = image_batch(seeds, tokenizer, grid=shape.grid, **which).to(device)
        return replace(batch, tokens=encode_image(images, batch.pixels).flatten(1))

    train_on_scenes(
        training,
        learner,
        partial(batch_of, only_prompts=only_prompts),
        batch_of(np.arange(CHECK_SCENES), dropped=0.0),
        title=f"image tokens, given a {condition}",
        stage=STAGE,
        count=training.batch_size + only_prompts,
        slow_factor=1.0 if start is None else FINE_TUNING_FACTOR,  # for all parameters
    )
    learner.write_null_embedding()
    words = None if text_encoder is None else tokenizer
    save = partial(save_image_model, transformer, text_encoder, words, out, vq=vq, reader=reader)
    options = {"vq": vq, "size": size, "condition": condition, **training.length}
    options |= {"from": start, "reader": reader}
    return finish(training, out, save, command="image", options=options, model=transformer, before=before)


def _check_vq(folder: Path, vq: VQModel, entries: int) -> None:
    config: Any = vq.config
    codes, stride = config.num_vq_embeddings, 2 ** (len(config.block_out_channels) - 1)
    if codes != entries or stride * GRID != IMAGE_SIZE:
        wanted = IMAGE_SIZE // GRID
        rule = f"must be a tokenizer with {entries} codes of {wanted} x {wanted} pixels"
        raise CheckpointError("vq", str(folder), f"{rule}, not {codes} of {stride} x {stride}")
