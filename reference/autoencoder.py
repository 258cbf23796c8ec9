"""Training of the KL autoencoder, whose latents are the continuous image tokens of reference models.

The KL divergence makes the encoder add noise to the latents. The decoder thereby learns to tolerate errors of
about that size, which a model that predicts the latents always makes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from torch import Tensor, nn

from mmspec.registry import require_known
from mmspec.scenes.reader import AttributeReader, load_reader
from mmspec.training.record import taken_over
from mmspec.training.run import RunOptions, Training, flush_subnormals
from reference.image_data import GRID, IMAGE_SIZE, PixelBatch, pixel_batch
from reference.trainer import finish
from reference.vq import ImageError, save_pixels, train_pixels

__all__ = [
    "AUTOENCODER_SHAPES",
    "KLReconstruction",
    "build_autoencoder",
    "noisy_batch",
    "train_autoencoder",
]

MEASURED_SCENES = 256
DEFAULT_MINUTES = 20.0
STAGE = 13
OBJECT_WEIGHT = 3.0  # as for the VQ
KL_WEIGHT = 3e-3  # of the mean over the latents' elements, against the mean over the pixels' elements
LATENT_CHANNELS = 8
FIRST_LOG_VARIANCE = -4.0
RATE_FACTOR = 2.0  # of the learning rate: weights of kernels this narrow are larger than in the other models

AUTOENCODER_SHAPES: dict[str, dict[str, Any]] = {
    "base": {"block_out_channels": (16, 32, 40), "norm_num_groups": 8},
    "tiny": {"block_out_channels": (8, 8, 8), "norm_num_groups": 4},
}
"""In both sizes a latent has 4 x 4 pixels and 8 channels."""


@dataclass(frozen=True)
class NoisyBatch(PixelBatch):
    """Images with the noise `[B, 8, 16, 16]` of their latents."""

    noise: Tensor


class KLReconstruction(nn.Module):
    """Squared error of the images (see `ImageError`), and KL divergence of the latents from unit Gaussians.

    Args:
        vae: the autoencoder.
        reader: the reader whose features are compared too; None for pixels only.
    """

    def __init__(self, vae: AutoencoderKL, reader: AttributeReader | None = None) -> None:
        super().__init__()
        self.vae = vae
        self.image_error = ImageError(reader)

    def forward(self, batch: NoisyBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: errors of the images, `kl` in nats per element, and two deviations.

        `std` is the standard deviation of the latents' means, `noise` that of a latent about its mean.
        """
        latents = self.vae.encode(batch.pixels).latent_dist
        drawn = self.vae.decode(latents.mean + latents.std * batch.noise).sample
        loss, figures = self.image_error(drawn, batch)
        figures["kl"] = latents.kl().mean() / latents.mean[0].numel()
        figures["std"] = latents.mean.std()
        figures["noise"] = latents.var.mean().sqrt()
        return loss + KL_WEIGHT * figures["kl"], figures


def build_autoencoder(size: str = "base") -> AutoencoderKL:
    """Build an autoencoder with random weights: images [B, 3, 64, 64] in [-1, 1], latents [B, 8, 16, 16]."""
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
                # With noise as large as the signal, the decoder ignores the latents for hundreds of steps.
                parameter[LATENT_CHANNELS:] = FIRST_LOG_VARIANCE
            elif ".conv2." in name:  # residual blocks that start as the identity learn much faster here
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
    """Train an autoencoder (4 x 4 pixels per latent) and save it as a folder of diffusers' `AutoencoderKL`.

    The config's `scaling_factor` scales the latents of held-out images to a standard deviation of 1.

    Args:
        out: the folder to write.
        reader: a folder of `train_reader`, whose features are compared too; None for pixels only.
        start: a trained autoencoder to start from, instead of random weights.
        size: "base", or "tiny" (for tests).
        how: see `RunOptions`; by default 20 minutes, with 8 images per step and process.

    Returns:
        The folder. Its `training.json` records the training.

    Raises:
        InputError: the size is unknown; see also `Training`.
        CheckpointError: `reader`, `start` or the state to resume from is missing or does not fit.
    """
    require_known("size", size, AUTOENCODER_SHAPES)
    training = Training(Path(out), how, minutes=DEFAULT_MINUTES, batch_size=8)
    judge = None if reader is None else load_reader(reader)
    vae = build_autoencoder(size)
    before = taken_over(
        start,
        "an autoencoder of the same size",
        lambda folder: vae.load_state_dict(
            AutoencoderKL.from_pretrained(folder, torch_dtype=torch.float32).state_dict()
        ),
    )
    # no `slow`: the factor applies to all parameters
    train_pixels(training, KLReconstruction(vae, judge), noisy_batch, STAGE, slow_factor=RATE_FACTOR)
    if training.accelerator.is_main_process:
        vae.register_to_config(scaling_factor=_scaling_factor(vae))
    options = {"size": size, **training.length, "reader": reader, "from": start}
    save = partial(save_pixels, vae, Path(out))
    return finish(training, Path(out), save, command="autoencoder", options=options, model=vae, before=before)


def noisy_batch(seeds: np.ndarray) -> NoisyBatch:
    """Make images of scenes and their noise from the seeds alone, so that a resumed run has the same data."""
    images = pixel_batch(seeds, OBJECT_WEIGHT)
    noise = np.random.default_rng(seeds).standard_normal(
        (len(seeds), LATENT_CHANNELS, GRID, GRID), dtype=np.float32
    )
    return NoisyBatch(images.pixels, images.weights, torch.from_numpy(noise))


@torch.inference_mode()
def _scaling_factor(vae: AutoencoderKL) -> float:
    """Return 1 / the standard deviation of all latents of held-out images, their noise included."""
    parts = pixel_batch(np.arange(MEASURED_SCENES)).pixels.to(vae.device).split(32)
    latents = [vae.encode(part).latent_dist for part in parts]
    means, noise = (torch.cat([getattr(part, name) for part in latents]) for name in ("mean", "var"))
    return round(float((means.var() + noise.mean()).rsqrt()), 5)
