"""Training of the reference image models: a LlamaGen over the tokens of scenes, given a prompt or a class.

The text encoder learns with it. Every batch is made of new scenes, and the prompts say all or part of them.
"""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.models.autoencoders.vq_model import VQModel
from torch import Tensor
from transformers import PreTrainedTokenizerFast, T5EncoderModel

from mmspec.errors import CheckpointError, InputError
from mmspec.models.autoencoders import encode_image
from mmspec.models.image_parts import TEXT_ENCODER, TOKENIZER, VQ, load_vq
from mmspec.models.llamagen import LlamaGenForCausalLM
from mmspec.registry import did_you_mean
from mmspec.scenes import COLOURS, SHAPES, training_seeds
from mmspec.scenes.reader import load_reader
from mmspec.training.record import donor, save_trained, training_record
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals, held_out_figures
from reference import TRAIN
from reference.image_data import GRID, IMAGE_SIZE, ImageBatch, image_batch
from reference.image_model import (
    SHAPES_BY_SIZE,
    ImageLoss,
    build_caption_tokenizer,
    build_text_encoder,
    build_transformer,
)

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


def take_weights(
    learner: ImageLoss, folder: Path, tokenizer: PreTrainedTokenizerFast
) -> list[dict[str, Any]]:
    """Take over all weights that fit; returns the stages of the donor's training.

    A model of classes begins with what a model of captions sees of each class's name.

    Raises:
        CheckpointError: there is no trained model in the folder, or it has another shape.
    """
    with donor(folder, "a model that `python -m reference train image` wrote, of the same size") as stages:
        trained = LlamaGenForCausalLM.from_pretrained(folder, dtype=torch.float32)
        kept = trained.state_dict()
        conditions = trained.config.condition_type, learner.transformer.config.condition_type
        encoder = None
        if conditions[0] == "caption":
            encoder = T5EncoderModel.from_pretrained(folder / TEXT_ENCODER, dtype=torch.float32)
        if conditions[0] != conditions[1]:
            kept = {name: value for name, value in kept.items() if "cls_embedding" not in name}
        missing, surplus = learner.transformer.load_state_dict(kept, strict=False)
        if surplus or any("cls_embedding" not in name for name in missing):
            raise ValueError(f"keys that do not fit: {[*surplus, *missing][:3]}")
        if encoder is not None and learner.text_encoder is not None:
            learner.text_encoder.load_state_dict(encoder.state_dict())
            learner.null_embedding.data.copy_(kept["model.cls_embedding.uncond_embedding"])
        elif encoder is not None:
            table = learner.transformer.model.cls_embedding.embedding_table
            table.weight.data.copy_(_class_vectors(trained, encoder, tokenizer))
    return stages


@torch.no_grad()
def _class_vectors(
    donor: LlamaGenForCausalLM, encoder: T5EncoderModel, tokenizer: PreTrainedTokenizerFast
) -> Tensor:
    """[classes + 1, width] the mean slot of "a red circle" and so on, the last of no caption."""
    projection: Any = donor.model.cls_embedding.cap_proj
    names = [f"a {colour} {shape}" for colour in COLOURS for shape in SHAPES]
    words = tokenizer(names, add_special_tokens=False, return_tensors="pt")["input_ids"]
    features = encoder(input_ids=words).last_hidden_state
    null: Any = donor.model.cls_embedding.uncond_embedding
    return torch.cat([projection(features).mean(1), projection(null).mean(0, keepdim=True)])


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
    out, vq = Path(out), Path(vq)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16, checkpoint_s=120.0)
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
