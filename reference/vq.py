"""The image tokenizer and its training, on pixels and optionally on the features of the attribute reader.

The squared error of pixels alone blurs the details that distinguish a star from a cross, or dots from
stripes. A latent is quantised to the nearest code by angle. Codes are running means, and dead codes are
replaced.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.autoencoders.vq_model import VQModel
from einops import rearrange
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.errors import InputError
from mmspec.registry import require_known
from mmspec.scenes.reader import AttributeReader, load_reader
from mmspec.training.record import half_precision, taken_over, write_record
from mmspec.training.run import RunOptions, Training, flush_subnormals
from reference.image_data import PixelBatch, pixel_batch
from reference.trainer import finish, train_on_scenes

__all__ = [
    "ImageError",
    "Reconstruction",
    "VQ_SHAPES",
    "build_vq",
    "save_pixels",
    "save_vq",
    "train_pixels",
    "train_vq",
]

FEATURE_WEIGHT = 0.08  # makes the error of features about as large as the error of pixels


class ImageError:
    """Squared error of the pixels, and of the reader's features if there is a reader.

    The class is not a module, so that learners do not train or save the reader.

    Args:
        reader: the reader whose features are compared; None for pixels only.
    """

    def __init__(self, reader: AttributeReader | None = None) -> None:
        self.reader = None if reader is None else reader.eval().requires_grad_(False)

    def __call__(self, drawn: Tensor, batch: PixelBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss of images [B, 3, H, W], and figures: squared errors of pixels and features."""
        real = batch.pixels
        loss = ((drawn - real).square() * batch.weights).mean() / batch.weights.mean()
        figures = {"mse": F.mse_loss(drawn, real)}
        if self.reader is not None:
            figures["features"] = _feature_error(self.reader, drawn, real)
            loss = loss + FEATURE_WEIGHT * figures["features"]
        return loss, figures


def _feature_error(reader: AttributeReader, drawn: Tensor, real: Tensor) -> Tensor:
    """Return the mean squared distance of the states after each layer, divided by the layer's variance."""
    with torch.no_grad():
        wanted = reader.tower(real, output_hidden_states=True).hidden_states[1:]
    seen = reader.tower(drawn, output_hidden_states=True).hidden_states[1:]
    errors = [(one - other).square().mean() / other.var() for one, other in zip(seen, wanted, strict=True)]
    return torch.stack(errors).mean()


DECAY = 0.95  # of the running means, per step
DEAD = 0.2  # a code with less than this share of the mean use is replaced
COMMITMENT = 0.25

VQ_SHAPES: dict[str, dict[str, Any]] = {
    "base": {"block_out_channels": (24, 48, 128), "norm_num_groups": 8, "num_vq_embeddings": 1024},
    "tiny": {"block_out_channels": (8, 8, 8), "norm_num_groups": 4, "num_vq_embeddings": 64},
}
"""In both sizes a token has 4 x 4 pixels, and a code has 8 channels."""


def build_vq(size: str = "base") -> VQModel:
    """Build an image tokenizer with random weights."""
    shape = VQ_SHAPES[size]
    levels = len(shape["block_out_channels"])
    vq: VQModel = VQModel(
        down_block_types=("DownEncoderBlock2D",) * levels,
        up_block_types=("UpDecoderBlock2D",) * levels,
        layers_per_block=1,
        latent_channels=8,
        vq_embed_dim=8,
        sample_size=64,
        **shape,
    )
    return vq


class Reconstruction(nn.Module):
    """Squared error of the images (see `ImageError`), and the commitment loss.

    The codebook is not trained by gradients. Each code is the mean direction of the latents quantised to it,
    a running mean over about twenty steps. Rarely used codes are replaced by latents of the batch.

    Args:
        vq: the image tokenizer; its codebook stays normalised.
        reader: the reader whose features are compared too; None for pixels only.
    """

    uses: Tensor
    sums: Tensor
    moves: Tensor

    def __init__(self, vq: VQModel, reader: AttributeReader | None = None) -> None:
        super().__init__()
        self.vq = vq
        codebook = vq.quantize.embedding.weight
        codebook.requires_grad_(False)
        codebook.copy_(F.normalize(codebook, dim=-1))
        # A use of 0 makes the first step replace every code by a latent.
        self.register_buffer("uses", torch.zeros(len(codebook)))
        self.register_buffer("sums", codebook.detach().clone())
        self.register_buffer("moves", torch.zeros((), dtype=torch.long))
        self.image_error = ImageError(reader)

    def forward(self, batch: PixelBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: squared errors of pixels and features, codes in use, perplexity."""
        latents = F.normalize(self.vq.encode(batch.pixels).latents, dim=1)
        codebook = self.vq.quantize.embedding.weight
        flat = rearrange(latents.detach(), "b width rows columns -> (b rows columns) width")
        chosen = (flat @ codebook.T).argmax(-1)
        rows, columns = latents.shape[2:]
        codes = rearrange(
            codebook[chosen], "(b rows columns) width -> b width rows columns", rows=rows, columns=columns
        )
        straight_through = latents + (codes - latents).detach()
        drawn = self.vq.decode(straight_through, force_not_quantize=True).sample
        loss, figures = self.image_error(drawn, batch)
        loss = loss + COMMITMENT * (latents - codes).square().mean()
        counts = torch.bincount(chosen, minlength=len(codebook)).to(flat.dtype)
        if self.training and torch.is_grad_enabled():
            self._move_codes(flat, chosen, counts)
        shares = counts / counts.sum()
        figures["codes"] = (counts > 0).sum()
        figures["perplexity"] = torch.special.entr(shares).sum().exp()
        return loss, figures

    @torch.no_grad()
    def _move_codes(self, flat: Tensor, chosen: Tensor, counts: Tensor) -> None:
        sums = torch.zeros_like(self.sums).index_add_(0, chosen, flat)
        # Seeded by the step, so that a resumed run draws the same numbers as an uninterrupted one.
        generator = torch.Generator().manual_seed(int(self.moves))
        spare = flat[torch.randint(len(flat), (len(counts),), generator=generator).to(flat.device)]
        self.moves += 1
        if torch.distributed.is_initialized():
            torch.distributed.all_reduce(sums)
            torch.distributed.all_reduce(counts)
            torch.distributed.broadcast(spare, src=0)
        dead = self.uses <= DEAD * self.uses.mean()
        self.uses.lerp_(counts, 1 - DECAY)
        self.sums.lerp_(sums, 1 - DECAY)
        typical = self.uses.mean()
        self.sums.copy_(torch.where(dead[:, None], spare * typical, self.sums))
        self.uses.copy_(torch.where(dead, typical, self.uses))
        self.vq.quantize.embedding.weight.copy_(F.normalize(self.sums, dim=-1))


WEIGHTS = "diffusion_pytorch_model.safetensors"
CHECK_SCENES = 64
DEFAULT_MINUTES = 25.0
STAGE = 8
OBJECT_WEIGHT = 3.0  # captions describe the objects, which cover only a fifth of an image


@flush_subnormals()
def train_vq(
    out: str | Path,
    *,
    reader: str | Path | None = None,
    start: str | Path | None = None,
    size: str = "base",
    **how: Unpack[RunOptions],
) -> Path:
    """Train an image tokenizer (4 x 4 pixels per token) and save it as a folder of diffusers' `VQModel`.

    Args:
        out: the folder to write.
        reader: a folder of `train_reader`, whose features are compared too; None for pixels only.
        start: a trained image tokenizer to start from, instead of random weights.
        size: "base", or "tiny" (for tests).
        how: see `RunOptions`; by default 25 minutes, with 16 images per step and process.

    Returns:
        The folder. Its `training.json` records the training.

    Raises:
        InputError: the size is unknown, or `accelerate launch` shards the weights (FSDP 2).
        CheckpointError: `reader`, `start` or the state to resume from is missing or does not fit.
    """
    require_known("size", size, VQ_SHAPES)
    training = Training(Path(out), how, minutes=DEFAULT_MINUTES, batch_size=16)
    judge, accelerator = None if reader is None else load_reader(reader), training.accelerator
    if accelerator.is_fsdp2:
        rule = "cannot shard weights, because FSDP would lose the codes, which have no gradients"
        raise InputError("accelerate launch", accelerator.distributed_type.value, rule)
    vq = build_vq(size)
    before = taken_over(
        start,
        "an image tokenizer of the same size that `python -m reference train vq` wrote",
        lambda folder: vq.load_state_dict(
            VQModel.from_pretrained(folder, torch_dtype=torch.float32).state_dict()
        ),
    )
    batch = partial(pixel_batch, object_weight=OBJECT_WEIGHT)
    train_pixels(training, Reconstruction(vq, judge), batch, STAGE)
    options = {"size": size, **training.length, "reader": reader, "from": start}
    save = partial(save_vq, vq, Path(out))
    return finish(training, Path(out), save, command="vq", options=options, model=vq, before=before)


def train_pixels(
    training: Training, learner: Any, batch: Callable[[np.ndarray], PixelBatch], stage: int, **rates: Any
) -> None:
    """Train a learner that has an `image_error`, such as `Reconstruction`; see `train_on_scenes`."""
    judge: AttributeReader | None = learner.image_error.reader
    if judge is not None:
        judge.to(training.accelerator.device)
    title = "pixels" if judge is None else "pixels and features"
    held_out = batch(np.arange(CHECK_SCENES))
    train_on_scenes(training, learner, batch, held_out, title=title, stage=stage, digits=4, **rates)


def save_vq(vq: VQModel, folder: Path, training: dict[str, Any]) -> None:
    """Save an image tokenizer in half precision, its codebook in a separate file, and the record.

    The layout is that of `mmspec convert`.
    """
    save_pixels(vq, folder, training)
    codebook = vq.quantize.embedding.weight.detach().to("cpu", torch.float16).contiguous()
    save_file({"codebook": codebook.clone()}, folder / "raw_codebook.safetensors")


def save_pixels(model: VQModel | AutoencoderKL, folder: Path, training: dict[str, Any]) -> None:
    """Save a diffusers model in half precision, with the record."""
    folder.mkdir(parents=True, exist_ok=True)
    model.save_config(folder)
    save_file(half_precision(model), folder / WEIGHTS, metadata={"format": "pt"})
    write_record(folder, training)
