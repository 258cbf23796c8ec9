"""Training of the reference image models: a LlamaGen over the tokens of scenes, given a prompt or a class.

The text encoder learns with it. Every batch is made of new scenes, and the prompts say all or part of them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.models.autoencoders.vq_model import VQModel

from mmspec.errors import CheckpointError, InputError
from mmspec.models.autoencoders import encode_image
from mmspec.models.image_parts import load_vq
from mmspec.registry import did_you_mean
from mmspec.scenes import training_seeds
from mmspec.scenes.reader import load_reader
from mmspec.training.record import training_record
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals, held_out_figures
from reference import TRAIN
from reference.image_data import GRID, IMAGE_SIZE, ImageBatch, image_batch
from reference.image_folder import save_image_model
from reference.image_model import (
    SHAPES_BY_SIZE,
    ImageLoss,
    build_caption_tokenizer,
    build_text_encoder,
    build_transformer,
)
from reference.image_start import take_weights

__all__ = ["train_image"]

CONDITIONS = ("caption", "class")
CHECK_SCENES = 32
DEFAULT_MINUTES = 75.0
STAGE = 9
FINE_TUNING_FACTOR = 0.5
PROMPTS_PER_IMAGE = 7  # prompts without image cost next to nothing, and the text encoder learns from them


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
    """Train a reference image model and save it as one folder (see `image_folder`).

    Args:
        out: the folder to write.
        vq: a trained tokenizer, which stays as it is and goes into the folder.
        reader: a trained reader that goes into the folder too, for evaluation; the training needs none.
        condition: "caption", or "class" (colour and shape of the leftmost object, 48 labels).
        start: a trained image model to begin with, instead of random weights; its condition may differ.
        size: "base", "long" (32 x 32 tokens) or "tiny" (for tests).
        how: see `RunOptions`; by default 75 minutes, of 16 images a step and process.

    Returns:
        The folder. Its `training.json` records how it was made.
    """
    if size not in SHAPES_BY_SIZE:
        raise InputError("size", size, did_you_mean(size, SHAPES_BY_SIZE))
    if condition not in CONDITIONS:
        raise InputError("condition", condition, did_you_mean(condition, CONDITIONS))
    training = Training(Path(out), how, minutes=DEFAULT_MINUTES, batch_size=16, checkpoint_s=120.0)
    out, vq = Path(out), Path(vq)
    accelerator = training.accelerator
    images = load_vq(str(vq), vq).requires_grad_(False).to(accelerator.device)
    if reader is not None:
        load_reader(reader)  # refuses what is none, before the work
    shape = SHAPES_BY_SIZE[size]
    _check_vq(vq, images, shape.entries)
    tokenizer = build_caption_tokenizer()
    transformer = build_transformer(shape, condition)
    text_encoder = build_text_encoder(shape, tokenizer) if condition == "caption" else None
    learner = ImageLoss(transformer, text_encoder)
    before = [] if start is None else take_weights(learner, Path(start), tokenizer)

    only_prompts = 0 if text_encoder is None else PROMPTS_PER_IMAGE * training.batch_size

    def make(step: int) -> ImageBatch:
        count = training.batch_size + only_prompts
        seeds = training_seeds(training.seed, STAGE, step, accelerator.process_index, count)
        batch = image_batch(seeds, tokenizer, only_prompts=only_prompts, grid=shape.grid)
        return _with_tokens(batch, images, accelerator.device)

    held_out = _with_tokens(
        image_batch(np.arange(CHECK_SCENES), tokenizer, dropped=0.0, grid=shape.grid),
        images,
        accelerator.device,
    )

    check = held_out_figures(held_out, accelerator.device)
    stage = Stage(f"image tokens, given a {condition}", learner, make, check)
    if start is not None:
        stage.slow, stage.slow_factor = "", FINE_TUNING_FACTOR  # the empty text is part of every name
    training.train(stage)
    if accelerator.is_main_process:
        options = {"out": out, "vq": vq, "size": size, "condition": condition, **training.length}
        options |= {"from": start, "reader": reader}
        record = training_record(f"{TRAIN} image", options, training, transformer, before)
        learner.write_null_embedding()
        words = None if text_encoder is None else tokenizer
        save_image_model(transformer, text_encoder, words, out, record, vq=vq, reader=reader)
    accelerator.wait_for_everyone()
    return out


def _with_tokens(batch: ImageBatch, vq: VQModel, device: torch.device) -> ImageBatch:
    batch = batch.to(device)
    batch.tokens = encode_image(vq, batch.pixels).flatten(1)
    return batch


def _check_vq(folder: Path, vq: VQModel, entries: int) -> None:
    config: Any = vq.config
    codes, stride = config.num_vq_embeddings, 2 ** (len(config.block_out_channels) - 1)
    if codes != entries or stride * GRID != IMAGE_SIZE:
        wanted = IMAGE_SIZE // GRID
        allowed = f"a tokenizer with {entries} codes of {wanted} x {wanted} pixels"
        raise CheckpointError("vq", str(folder), f"{allowed}; it has {codes} of {stride} x {stride}")
