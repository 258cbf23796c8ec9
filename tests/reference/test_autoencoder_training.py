"""Training and scores of the KL autoencoder on tiny ones."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file

from mmspec.errors import CheckpointError, InputError
from reference.autoencoder import (
    KL_WEIGHT,
    KLReconstruction,
    build_autoencoder,
    noisy_batch,
    train_autoencoder,
)
from reference.image_data import pixel_batch
from reference.reader import train_reader

STEPS = 12
WEIGHTS = "diffusion_pytorch_model.safetensors"


@pytest.fixture(scope="module")
def reader(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_reader(tmp_path_factory.mktemp("reader") / "reader", size="tiny", steps=1, batch_size=4)


@pytest.fixture(scope="module")
def losses() -> list[float]:
    return []


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory, reader: Path, losses: list[float]) -> Path:
    out = tmp_path_factory.mktemp("autoencoder") / "vae"
    return train_autoencoder(
        out,
        reader=reader,
        size="tiny",
        steps=STEPS,
        batch_size=4,
        on_step=lambda step, loss: losses.append(loss),
    )


def test_training_lowers_the_loss(trained: Path, losses: list[float]) -> None:
    assert len(losses) == STEPS and np.mean(losses[-3:]) < np.mean(losses[:3])


def test_a_resumed_run_ends_where_an_uninterrupted_one_does(
    trained: Path, reader: Path, losses: list[float], tmp_path: Path
) -> None:
    class Interrupted(Exception):
        pass

    seen: list[float] = []

    def record(step: int, loss: float) -> None:
        seen.append(loss)
        if len(seen) == 5:
            raise Interrupted

    out, how = tmp_path / "vae", {"size": "tiny", "steps": STEPS, "batch_size": 4, "checkpoint_s": 0}
    with pytest.raises(Interrupted):
        train_autoencoder(out, reader=reader, on_step=record, **how)  # type: ignore[arg-type]
    train_autoencoder(out, reader=reader, on_step=record, resume=True, **how)  # type: ignore[arg-type]
    assert seen == losses
    one, other = load_file(trained / WEIGHTS), load_file(out / WEIGHTS)
    assert one.keys() == other.keys() and all(torch.equal(one[key], other[key]) for key in one)


def test_diffusers_loads_the_folder_and_its_scaled_latents_have_deviation_one(trained: Path) -> None:
    vae = AutoencoderKL.from_pretrained(trained, torch_dtype=torch.float32)
    assert all(tensor.dtype == torch.float16 for tensor in load_file(trained / WEIGHTS).values())
    with torch.no_grad():
        latents = vae.encode(pixel_batch(np.arange(256)).pixels).latent_dist
        scaled = latents.sample(torch.Generator().manual_seed(0)) * vae.config.scaling_factor
        assert scaled.shape == (256, 8, 16, 16) and float(scaled.std()) == pytest.approx(1.0, abs=0.01)
        assert vae.decode(scaled[:2] / vae.config.scaling_factor).sample.shape == (2, 3, 64, 64)


def test_the_record_says_how_it_was_made_and_a_second_training_goes_on_from_it(
    trained: Path, tmp_path: Path
) -> None:
    record = json.loads((trained / "training.json").read_text())
    assert record["command"].startswith("python -m reference train autoencoder --out ")
    assert {"mse", "features", "kl", "std", "noise"} < set(record["stages"][0])
    out = train_autoencoder(tmp_path / "more", start=trained, size="tiny", steps=1, batch_size=2)
    stages = json.loads((out / "training.json").read_text())["stages"]
    assert [stage["steps"] for stage in stages] == [STEPS, 1]
    before, after = load_file(trained / WEIGHTS), load_file(out / WEIGHTS)
    assert max(float((before[key] - after[key]).abs().max()) for key in before) < 1e-2


def test_the_base_size_stays_small() -> None:
    assert sum(parameter.numel() for parameter in build_autoencoder("base").parameters()) <= 400_000


def test_what_does_not_fit_is_refused_before_the_work(trained: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    for wrong in ({"size": "huge", "steps": 1}, {"size": "tiny", "steps": 1, "minutes": 1.0}):
        with pytest.raises(InputError):
            train_autoencoder(out, **wrong)  # type: ignore[arg-type]
    for missing in ({"reader": tmp_path}, {"start": tmp_path}, {"resume": True}):
        with pytest.raises(CheckpointError):
            train_autoencoder(out, size="tiny", steps=1, **missing)  # type: ignore[arg-type]
    with pytest.raises(CheckpointError):
        train_autoencoder(out, start=trained, steps=1)  # a tiny one for the base size
    assert not out.exists()


def test_the_loss_is_that_of_the_drawn_latents() -> None:
    """Noise reaches the images, and the KL is a mean over the latents' elements."""
    torch.manual_seed(0)
    batch = noisy_batch(np.arange(2))
    learner = KLReconstruction(build_autoencoder("tiny"))
    with torch.no_grad():
        loss, figures = learner(batch)
        latents = learner.vae.encode(batch.pixels).latent_dist
        drawn = learner.vae.decode(latents.mean + latents.std * batch.noise).sample
    error = ((drawn - batch.pixels).square() * batch.weights).mean() / batch.weights.mean()
    kl = 0.5 * (latents.mean.square() + latents.var - 1 - latents.logvar).mean()
    torch.testing.assert_close(figures["kl"], kl)
    torch.testing.assert_close(loss, error + KL_WEIGHT * kl)
