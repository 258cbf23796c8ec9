"""Training of the reference models of continuous tokens, at a size for tests."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from mmspec.errors import CheckpointError, InputError
from mmspec.models.autoencoders import load_autoencoder
from mmspec.models.mar import MARForImageGeneration
from mmspec.models.nextstep import NextStepForImageGeneration
from reference.autoencoder import train_autoencoder
from reference.image_data import image_batch
from reference.latent_model import LatentBatch, build_latent_tokenizer
from reference.latents import encode_latents, train_latent_model

CLASSES = {"nextstep": NextStepForImageGeneration, "mar": MARForImageGeneration}


@pytest.fixture(scope="module")
def vae(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_autoencoder(tmp_path_factory.mktemp("vae") / "vae", size="tiny", steps=1, threads=1)


@pytest.mark.parametrize("kind", CLASSES)
def test_a_training_saves_what_can_be_loaded(kind: str, vae: Path, tmp_path: Path) -> None:
    losses: list[float] = []
    folder = train_latent_model(
        tmp_path / kind,
        vae,
        kind=kind,
        size="tiny",
        steps=3,
        batch_size=2,
        threads=1,
        on_step=lambda step, loss: losses.append(loss),
    )
    assert len(losses) == 3 and all(np.isfinite(losses))
    model = CLASSES[kind].from_pretrained(folder, dtype=torch.float32)
    assert all(weight.isfinite().all() for weight in model.parameters())
    assert load_autoencoder(folder / "vae").config.latent_channels == 8
    record = json.loads((folder / "training.json").read_text())
    assert "python -m reference train latents" in record["command"] and f"--kind {kind}" in record["command"]


def test_latents_stand_in_raster_order(vae: Path) -> None:
    images = load_autoencoder(vae)
    batch = image_batch(np.arange(2), build_latent_tokenizer(), objects=1)
    latents = encode_latents(images, batch.pixels)
    both = LatentBatch.of(batch, latents)
    assert both.latents.shape == (2, 256, 8)
    assert torch.equal(both.latents[1, 16 * 3 + 5], latents[1, :, 3, 5])


def test_bad_arguments_are_refused(vae: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="nextstep"):
        train_latent_model(tmp_path / "a", vae, kind="nextsteps")
    with pytest.raises(InputError, match="half"):
        train_latent_model(tmp_path / "b", vae, kind="mar", size="halve")
    with pytest.raises(CheckpointError, match="vae"):
        train_latent_model(tmp_path / "c", tmp_path, kind="mar", size="tiny")
