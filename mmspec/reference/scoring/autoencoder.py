"""Scores of a reference autoencoder on held-out scenes: errors, attribute accuracy, spread of the latents."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor

from mmspec.errors import CheckpointError, InputError
from mmspec.reference.scenes import HELD_OUT_SEEDS, caption
from mmspec.reference.scoring.attributes import AttributeJudge
from mmspec.reference.training.image_data import PixelBatch, image_scenes, pixel_batch
from mmspec.reference.training.image_error import ImageError

__all__ = ["FIRST_SEED", "score_autoencoder"]

FIRST_SEED = 20_000
NOISES = (0.1, 0.2, 0.3, 0.5)
BATCH = 32


@torch.inference_mode()
def score_autoencoder(
    folder: str | Path, reader: str | Path, scenes: int = 200, seed: int = FIRST_SEED
) -> dict[str, Any]:
    """Reconstruct held-out scenes, and measure what is left of them and how the latents are spread.

    Args:
        folder: that `train_autoencoder` wrote.
        reader: a folder that `train_reader` wrote.
        scenes: held-out scenes, with the seeds `seed`, `seed + 1`, ...
        seed: first seed, within `HELD_OUT_SEEDS`.

    Returns:
        `mse` and `features`: errors of the reconstructions from the latents' means; `real` and
        `reconstructed`: what the reader finds, as `AttributeScores`; `noisy`: its share of the facts when
        noise of such a deviation is added to the scaled latents, as a model does that predicts them; `kl` of
        a latent's element in nats; `mean` and `std`: of each channel of the scaled latents; `neighbour`: the
        correlation of horizontal neighbours; `scaling_factor`, `scenes`, `seed`.

    Raises:
        InputError: the scenes are not held-out ones.
        CheckpointError: there is no autoencoder or no reader in the folders.
    """
    if scenes < 1 or seed not in HELD_OUT_SEEDS or seed + scenes - 1 not in HELD_OUT_SEEDS:
        allowed = f"scenes within the held-out seeds 0 to {HELD_OUT_SEEDS.stop - 1}"
        raise InputError("seed", (seed, scenes), allowed)
    judge = AttributeJudge.from_folder(reader)
    try:
        vae = AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32).eval()
    except (OSError, ValueError) as error:
        allowed = "a folder that `mmspec train autoencoder` wrote"
        raise CheckpointError("autoencoder", str(folder), allowed) from error
    seeds = np.arange(seed, seed + scenes)
    captions = [caption(scene) for scene in image_scenes(seeds)]
    batch = pixel_batch(seeds)
    encoded = [vae.encode(part).latent_dist for part in batch.pixels.split(BATCH)]
    means, kl = torch.cat([part.mean for part in encoded]), torch.cat([part.kl() for part in encoded])
    scale = float(vae.config.scaling_factor)
    drawn = _decode(vae, means)
    generator = torch.Generator().manual_seed(seed)
    noise = torch.randn(means.shape, generator=generator) / scale
    noisy = {
        f"{level:g}": judge.attribute_accuracy(_shown(_decode(vae, means + level * noise)), captions)
        for level in NOISES
    }
    return {
        **_errors(ImageError(judge.reader), drawn, batch),
        "real": asdict(judge.score(_shown(batch.pixels), captions)),
        "reconstructed": asdict(judge.score(_shown(drawn), captions)),
        "noisy": noisy,
        "kl": round(float(kl.mean()) / means[0].numel(), 4),
        "mean": _rounded(means.mean((0, 2, 3)) * scale),
        "std": _rounded(means.std((0, 2, 3)) * scale),
        "neighbour": _neighbour_correlation(means),
        "scaling_factor": scale,
        "scenes": scenes,
        "seed": seed,
    }


def _decode(vae: AutoencoderKL, latents: Tensor) -> Tensor:
    """Images [n, 3, H, W] in about [-1, 1] of latents as they come out of the encoder."""
    return torch.cat([vae.decode(part).sample for part in latents.split(BATCH)])


def _shown(pixels: Tensor) -> Tensor:
    """Images in [0, 1], as a person would see them."""
    return ((pixels + 1) / 2).clamp(0, 1)


def _errors(error: ImageError, drawn: Tensor, batch: PixelBatch) -> dict[str, float]:
    _, figures = error(drawn, batch)
    return {name: round(float(value), 5) for name, value in figures.items()}


def _neighbour_correlation(latents: Tensor) -> float:
    """Correlation of latents with their left neighbours, over all channels."""
    centred = latents - latents.mean((0, 2, 3), keepdim=True)
    return round(float((centred[..., 1:] * centred[..., :-1]).mean() / centred.square().mean()), 4)


def _rounded(values: Tensor) -> list[float]:
    return [round(value, 3) for value in values.tolist()]
