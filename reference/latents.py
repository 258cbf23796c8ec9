"""Training of the reference models with continuous image tokens, on the latents of scenes.

A NextStep is conditioned on prompts that describe all or part of a scene. A MAR is conditioned on a class:
the colour and shape of the only object of an image. Every batch has new scenes.
"""

from __future__ import annotations

import shutil
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import nn
from transformers import GenerationConfig

from mmspec.errors import CheckpointError, InputError
from mmspec.families.nextstep.loading import load_nextstep
from mmspec.models.autoencoders import load_autoencoder
from mmspec.registry import require_known
from mmspec.scenes.reader import load_reader
from mmspec.training.record import save_trained, taken_over
from mmspec.training.run import RunOptions, Training, flush_subnormals
from reference.image import READER
from reference.image_data import GRID, IMAGE_SIZE, image_batch
from reference.latent_model import (
    LATENT_CHANNELS,
    LATENT_SHAPES,
    LatentBatch,
    MARLoss,
    NextStepDraftLoss,
    NextStepLoss,
    build_latent_tokenizer,
    build_mar,
    build_nextstep,
)
from reference.trainer import finish, train_on_scenes

__all__ = ["encode_latents", "train_latent_model"]

#: Generation settings of each kind, which are saved with the model.
GENERATION: dict[str, dict[str, Any]] = {
    "nextstep": {"guidance_scale": 3.0},
    "mar": {"guidance_scale": 3.0, "guidance_schedule": "rising", "clip_sample_range": 4.0},
}
DRAFT = "draft"
DRAFTS = (DRAFT, "half")
VAE = "vae"  # the autoencoder's folder inside the model's
CHECK_SCENES = 64
DEFAULT_MINUTES = 90.0
STAGE = 10
PROMPTS_PER_IMAGE = 3  # prompts without images, in the batches of a NextStep


@flush_subnormals()
def train_latent_model(
    out: str | Path,
    vae: str | Path,
    *,
    kind: str = "nextstep",
    reader: str | Path | None = None,
    start: str | Path | None = None,
    size: str = "base",
    target: str | Path | None = None,
    **how: Unpack[RunOptions],
) -> Path:
    """Train a reference model with continuous tokens and save it as one folder, with its autoencoder.

    Args:
        out: the folder to write.
        vae: a trained autoencoder (`train_autoencoder`). It is frozen and copied into the folder.
        kind: "nextstep" (conditioned on a prompt) or "mar" (conditioned on a class).
        reader: a trained reader to copy into the folder for evaluation; the training does not use it.
        start: a trained model of the same kind and size to start from, instead of random weights.
        size: "base", "half" (a MAR that drafts), "draft" (a NextStep that drafts for `target` and learns its
            chains), or "tiny" (for tests).
        target: the trained NextStep that a draft model drafts for. The folders of draft models ("draft" and
            "half") contain no autoencoder.
        how: see `RunOptions`; by default 90 minutes, with 16 images per step and process.

    Returns:
        The folder. Its `training.json` records the training.

    Raises:
        InputError: the kind or size is unknown, or `target` does not go with the size.
        CheckpointError: the tokens of the autoencoder do not have 4 x 4 pixels and 8 channels.
    """
    require_known("kind", kind, LATENT_SHAPES)
    require_known("size", size, LATENT_SHAPES[kind])
    if (size == DRAFT) != (target is not None):
        rule = "must be the target that it drafts for" if size == DRAFT else f"needs size={DRAFT!r}"
        raise InputError("target", target, rule)
    out, vae = Path(out), Path(vae)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16)
    device = training.accelerator.device
    images = load_autoencoder(vae).requires_grad_(False).to(device)
    _check_vae(vae, images)
    if reader is not None:
        load_reader(reader)  # raises before the training if the folder is not a reader
    tokenizer, shape = build_latent_tokenizer(), LATENT_SHAPES[kind][size]
    learner: nn.Module
    if kind == "nextstep":
        model: Any = build_nextstep(shape, tokenizer)
        learner, objects, only_prompts = NextStepLoss(model, tokenizer), None, PROMPTS_PER_IMAGE
        if target is not None:
            drafted_for = load_nextstep(target, dtype=torch.float32).to(device)
            learner, only_prompts = NextStepDraftLoss(model, drafted_for, tokenizer), 0
    else:
        model = build_mar(shape)
        learner, objects, only_prompts = MARLoss(model), 1, 0
    before = taken_over(
        start,
        f"a folder of a {type(model).__name__} that train_latent_model wrote",
        lambda folder: model.load_state_dict(
            type(model).from_pretrained(folder, dtype=torch.float32).state_dict()
        ),
    )
    only_prompts *= training.batch_size

    def batch_of(seeds: np.ndarray, **which: Any) -> LatentBatch:
        batch = image_batch(seeds, tokenizer, objects=objects, **which).to(device)
        return LatentBatch.of(batch, encode_latents(images, batch.pixels))

    train_on_scenes(
        training,
        learner,
        partial(batch_of, only_prompts=only_prompts),
        batch_of(np.arange(CHECK_SCENES), dropped=0.0),
        title=f"latents, {kind}",
        stage=STAGE,
        count=training.batch_size + only_prompts,
    )

    def save(record: dict[str, Any]) -> None:
        model.config.scaling_factor = images.config.scaling_factor
        save_trained(model, out, record)
        if kind == "nextstep":
            tokenizer.save_pretrained(out)
        GenerationConfig(**GENERATION[kind]).save_pretrained(out)
        if size not in DRAFTS:
            shutil.copytree(vae, out / VAE, dirs_exist_ok=True)
        if reader is not None:
            shutil.copytree(reader, out / READER, dirs_exist_ok=True)

    options = {"vae": vae, "kind": kind, "size": size, **training.length}
    options |= {"from": start, "reader": reader, "target": target}
    return finish(training, out, save, command="latents", options=options, model=model, before=before)


@torch.no_grad()
def encode_latents(vae: AutoencoderKL, pixels: torch.Tensor) -> torch.Tensor:
    """Encode images [B, 3, H, W] in [-1, 1] as latents [B, C, rows, columns] of about unit deviation."""
    config: Any = vae.config
    latents: torch.Tensor = vae.encode(pixels).latent_dist.mean
    scaled: torch.Tensor = (latents - (config.shift_factor or 0.0)) * config.scaling_factor
    return scaled


def _check_vae(folder: Path, vae: AutoencoderKL) -> None:
    config: Any = vae.config
    channels, stride = config.latent_channels, 2 ** (len(config.block_out_channels) - 1)
    if channels != LATENT_CHANNELS or stride * GRID != IMAGE_SIZE:
        wanted = IMAGE_SIZE // GRID
        rule = f"must be an autoencoder of {wanted} x {wanted} pixels with {LATENT_CHANNELS} channels"
        raise CheckpointError("vae", str(folder), f"{rule}, not {stride} x {stride} and {channels}")
