"""Training of the KL autoencoder, whose latents are the continuous image tokens of reference models.

The weight of the KL divergence keeps the latents spread out and smooth: a model that predicts them is never
quite right, and the decoder has learnt to bear as much noise as the encoder adds.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from safetensors.torch import save_file
from torch import Tensor, nn

from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.scenes import training_seeds
from mmspec.scenes.reader import AttributeReader, load_reader
from mmspec.training.record import donor, half_precision, training_record, write_record
from mmspec.training.run import RunOptions, Stage, Training, flush_subnormals, held_out_figures
from reference import TRAIN
from reference.image_data import GRID, IMAGE_SIZE, PixelBatch, pixel_batch
from reference.vq import ImageError

__all__ = [
    "AUTOENCODER_SHAPES",
    "KLReconstruction",
    "build_autoencoder",
    "noisy_batch",
    "save_autoencoder",
    "train_autoencoder",
]

CHECK_SCENES = 64
MEASURED_SCENES = 256
DEFAULT_MINUTES = 20.0
STAGE = 13
OBJECT_WEIGHT = 3.0  # as for the VQ
KL_WEIGHT = 3e-3  # of the mean over the latents' elements, against the mean over the pixels' elements
LATENT_CHANNELS = 8
FIRST_LOG_VARIANCE = -4.0
RATE_FACTOR = 2.0  # weights of kernels this narrow are larger than those of the other models

AUTOENCODER_SHAPES: dict[str, dict[str, Any]] = {
    "base": {"block_out_channels": (16, 32, 40), "norm_num_groups": 8},
    "tiny": {"block_out_channels": (8, 8, 8), "norm_num_groups": 4},
}
"""Both have 4 x 4 pixels a latent, of 8 channels."""


@dataclass
class NoisyBatch(PixelBatch):
    """Images with the noise `[B, 8, 16, 16]` that their latents are drawn with."""

    noise: Tensor


class KLReconstruction(nn.Module):
    """Squared error of the images (see `ImageError`), and KL divergence of the latents from unit Gaussians.

    Args:
        vae: the autoencoder.
        reader: compares images as the judge will; None for pixels alone.
    """

    def __init__(self, vae: AutoencoderKL, reader: AttributeReader | None = None) -> None:
        super().__init__()
        self.vae = vae
        self.image_error = ImageError(reader)

    def forward(self, batch: NoisyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """The loss, and figures: errors of the images, KL of a latent's element in nats, its deviations.

        `std` is that of the latents' means over images and places, `noise` that of a latent about its mean.
        """
        latents = self.vae.encode(batch.pixels).latent_dist
        drawn = self.vae.decode(latents.mean + latents.std * batch.noise).sample
        loss, figures = self.image_error(drawn, batch)
        figures["kl"] = latents.kl().mean() / latents.mean[0].numel()
        figures["std"] = latents.mean.std()
        figures["noise"] = latents.var.mean().sqrt()
        return loss + KL_WEIGHT * figures["kl"], figures


def build_autoencoder(size: str = "base") -> AutoencoderKL:
    """An autoencoder with random weights: images [B, 3, 64, 64] in [-1, 1], latents [B, 8, 16, 16]."""
    shape = AUTOENCODER_SHAPES[size]
    levels = len(shape["block_out_channels"])
    vae: AutoencoderKL = AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        sample_size=IMAGE_SIZE,
        mid_block_add_attention=False,
        force_upcast=False,
        **shape,
    )
    with torch.no_grad():
        for name, parameter in vae.named_parameters():
            if name == "quant_conv.bias":
                # Noise as large as the signal teaches the decoder to ignore latents, for hundreds of steps.
                parameter[LATENT_CHANNELS:] = FIRST_LOG_VARIANCE
            elif ".conv2." in name:  # residual blocks that begin as the identity learn much faster here
                parameter.zero_()
    return vae


@flush_subnormals()
def train_autoencoder(
    out: str | Path,
    *,
    reader: str | Path | None = None,
    start: str | Path | None = None,
    size: str = "base",
    **how: Unpack[RunOptions],
) -> Path:
    """Train an autoencoder (4 x 4 pixels a latent) and save it as a folder of diffusers' `AutoencoderKL`.

    The config's `scaling_factor` makes the deviation of the latents 1, over held-out images.

    Args:
        out: the folder to write.
        reader: a folder that `train_reader` wrote; its features are compared too. None: pixels alone.
        start: a trained autoencoder to begin with, instead of random weights.
        size: "base", or "tiny" (for tests).
        how: see `RunOptions`; by default 20 minutes, of 8 images a step and process.

    Returns:
        The folder. Its `training.json` records how it was made.

    Raises:
        InputError: an argument that is not allowed.
        CheckpointError: `reader`, `start` or the state to resume from is missing or does not fit.
    """
    if size not in AUTOENCODER_SHAPES:
        raise InputError("size", size, did_you_mean(size, AUTOENCODER_SHAPES))
    out = Path(out)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=8)
    judge = None if reader is None else load_reader(reader)
    accelerator = training.accelerator
    vae, before = build_autoencoder(size), []
    if start is not None:
        before = _take_weights(vae, Path(start))
    if judge is not None:
        judge.to(accelerator.device)
    title = "pixels" if judge is None else "pixels and features"
    learner = KLReconstruction(vae, judge)
    training.train(_stage(training, learner, title))
    if accelerator.is_main_process:
        options = {"out": out, "size": size, **training.length, "reader": reader, "from": start}
        vae.register_to_config(scaling_factor=_scaling_factor(vae))
        save_autoencoder(vae, out, training_record(f"{TRAIN} autoencoder", options, training, vae, before))
    accelerator.wait_for_everyone()
    return out


def save_autoencoder(vae: AutoencoderKL, folder: Path, training: dict[str, Any]) -> None:
    """Save in half precision, with the record."""
    folder.mkdir(parents=True, exist_ok=True)
    vae.save_config(folder)
    save_file(half_precision(vae), folder / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    write_record(folder, training)


def _stage(training: Training, learner: KLReconstruction, title: str) -> Stage:
    def make(step: int) -> NoisyBatch:
        process, count = training.accelerator.process_index, training.batch_size
        return noisy_batch(training_seeds(training.seed, STAGE, step, process, count))

    check = held_out_figures(noisy_batch(np.arange(CHECK_SCENES)), training.accelerator.device, digits=4)
    return Stage(title, learner, make, check, slow_factor=RATE_FACTOR)  # of all parameters


def noisy_batch(seeds: np.ndarray) -> NoisyBatch:
    """Images of scenes with their noise, both of the seeds: a resumed run sees what it would have seen."""
    images = pixel_batch(seeds, OBJECT_WEIGHT)
    noise = np.random.default_rng(seeds).standard_normal(
        (len(seeds), LATENT_CHANNELS, GRID, GRID), dtype=np.float32
    )
    return NoisyBatch(images.pixels, images.weights, torch.from_numpy(noise))


@torch.inference_mode()
def _scaling_factor(vae: AutoencoderKL) -> float:
    """One over the deviation of all latents of held-out images, their noise included."""
    parts = pixel_batch(np.arange(MEASURED_SCENES)).pixels.to(vae.device).split(32)
    latents = [vae.encode(part).latent_dist for part in parts]
    means, noise = (torch.cat([getattr(part, name) for part in latents]) for name in ("mean", "var"))
    return round(float((means.var() + noise.mean()).rsqrt()), 5)


def _take_weights(vae: AutoencoderKL, folder: Path) -> list[dict[str, Any]]:
    """Take over a trained autoencoder; returns the stages of its training."""
    with donor(folder, "an autoencoder of the same size") as stages:
        vae.load_state_dict(AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32).state_dict())
    return stages
