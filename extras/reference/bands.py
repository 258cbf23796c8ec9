"""Training of an image tokenizer of frequency bands (NFIG, 2503.07076), which begins with one of cells."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any, Unpack

import numpy as np
import torch
from diffusers.models.autoencoders.vq_model import VQModel
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.evaluation.quality.attributes import AttributeJudge
from mmspec.evaluation.quality.intervals import Estimate, as_share, jackknife
from mmspec.families.image_parts import VQ
from mmspec.families.var.tokenizer import shrunk
from mmspec.models.autoencoders import decode_tokens, encode_image
from mmspec.scenes import IMAGE_TOKENS, caption, sample_scene
from mmspec.scenes.reader import AttributeReader, load_reader
from mmspec.training.data.scenes import image_pixels
from mmspec.training.run import RunOptions, Training, flush_subnormals
from mmspec_extras.families.nfig.modeling import NFIGConfig
from mmspec_extras.families.nfig.tokenizer import BandVQModel, band_edges, low_pass, quantise_bands
from reference.image import READER
from reference.image_data import IMAGE_SIZE, PixelBatch, pixel_batch
from reference.trainer import finish
from reference.vq import COMMITMENT, OBJECT_WEIGHT, ImageError, save_pixels, train_pixels

__all__ = ["BandReconstruction", "begin_bands", "score_bands", "train_bands"]

PROGRAM = "python -m extras.reference"
STAGE = 25  # of the seeds of the scenes
DEFAULT_MINUTES = 10.0
FIRST_SCENES = 64  # whose bands the first codes are


@torch.no_grad()
def begin_bands(trained: VQModel, sides: Sequence[int], pixels: Tensor, seed: int = 0) -> BandVQModel:
    """Return a tokenizer with the encoder and decoder of another, whose codes are bands of images.

    Args:
        trained: an image tokenizer of cells.
        sides: tokens per side of the bands.
        pixels: [B, 3, H, W] images.
        seed: of the choice of the codes.
    """
    own: Any = trained.config
    shape = {name: own[name] for name in ("block_out_channels", "layers_per_block", "norm_num_groups")}
    blocks = {name: own[name] for name in ("down_block_types", "up_block_types")}
    sizes = {name: own[name] for name in ("latent_channels", "num_vq_embeddings")}
    vq: BandVQModel = BandVQModel(**shape, **blocks, **sizes)
    vq.encoder.load_state_dict(trained.encoder.state_dict())
    vq.decoder.load_state_dict(trained.decoder.state_dict())
    for name in ("quant_conv", "post_quant_conv"):
        begun, point = getattr(vq, name), getattr(trained, name)
        begun.weight.zero_()[:, :, 1:2, 1:2] = point.weight
        begun.bias.copy_(point.bias)
    smoothing: Any = vq.quantize.smoothing
    for convolution in smoothing:
        nn.init.dirac_(convolution.weight)
        nn.init.zeros_(convolution.bias)
    features = vq.quant_conv(vq.encoder(pixels))
    for weight in vq.quant_conv.parameters():  # the decoder knows vectors of length 1
        weight.div_(features.norm(dim=1).mean())
    features.div_(features.norm(dim=1).mean())
    below, parts = torch.zeros_like(features), list[Tensor]()
    for side, edge in zip(sides, band_edges(sides), strict=True):
        band = low_pass(features, edge) - below
        parts.append(shrunk(band, side).flatten(0, 1))
        below = below + band
    found, random = torch.cat(parts), torch.Generator().manual_seed(seed)
    chosen = torch.randint(len(found), (own.num_vq_embeddings,), generator=random)
    vq.quantize.embedding.weight.copy_(found[chosen])
    return vq


class BandReconstruction(nn.Module):
    """Error of images that are decoded from the bands, and distance of features and codes.

    Args:
        vq: the image tokenizer.
        sides: tokens per side of the bands.
        reader: see `ImageError`.
    """

    def __init__(self, vq: BandVQModel, sides: Sequence[int], reader: AttributeReader | None) -> None:
        super().__init__()
        self.vq, self.sides, self.image_error = vq, tuple(sides), ImageError(reader)

    def forward(self, batch: PixelBatch) -> tuple[Tensor, dict[str, Tensor]]:
        """Return the loss, and figures: squared errors of pixels and features, number of codes in use."""
        features = self.vq.quant_conv(self.vq.encoder(batch.pixels))
        codes, total = quantise_bands(self.vq.quantize, features, self.sides)
        loss, figures = self.image_error(self.vq.decode(features + (total - features).detach()), batch)
        apart = F.mse_loss(total, features.detach()) + COMMITMENT * F.mse_loss(features, total.detach())
        used = codes.unique().new_tensor(len(codes.unique())).float()
        return loss + apart, {**figures, "apart": apart.detach(), "codes": used}


@flush_subnormals()
def train_bands(out: str | Path, *, start: str | Path, **how: Unpack[RunOptions]) -> Path:
    """Train an image tokenizer of the ten bands of `NFIGConfig`, and save it as a folder of `BandVQModel`.

    Args:
        out: the folder to write.
        start: a LlamaGen with the image tokenizer to begin with, and the reader whose features are compared.
        how: see `RunOptions`; the default is 10 minutes, with 16 images per step and process.

    Returns:
        The folder. Its `training.json` records the training.
    """
    out, start = Path(out), Path(start)
    training = Training(out, how, minutes=DEFAULT_MINUTES, batch_size=16, check_s=300.0)
    sides = tuple(NFIGConfig().patch_nums)
    reader = load_reader(start / READER) if (start / READER).is_dir() else None
    trained = VQModel.from_pretrained(start / VQ, torch_dtype=torch.float32)
    first = pixel_batch(np.arange(2**40, 2**40 + FIRST_SCENES)).pixels
    vq = begin_bands(trained, sides, first, training.seed)
    batch = partial(pixel_batch, object_weight=OBJECT_WEIGHT)
    train_pixels(
        training, BandReconstruction(vq, sides, reader), batch, STAGE, outer=("embedding", "smoothing")
    )

    def save(record: dict[str, Any]) -> None:
        save_pixels(vq, out, record)  # type: ignore[arg-type]

    options = {"from": start, **training.length}
    return finish(training, out, save, command="bands", options=options, model=vq, program=PROGRAM)


@torch.inference_mode()
def score_bands(
    folder: str | Path,
    start: str | Path,
    scenes: int = 96,
    seed: int = 20_000,
    kept: Sequence[int] = (6, 8, 10),
) -> dict[str, list[Estimate]]:
    """Score an image tokenizer of bands on held-out scenes, beside that of a LlamaGen.

    Args:
        folder: the tokenizer.
        start: a LlamaGen, with an image tokenizer of cells and a reader of images.
        scenes: number of scenes.
        seed: seed of the first scene.
        kept: numbers of bands that are decoded, without those above.

    Returns:
        For each way to decode: squared error of pixels in [-1, 1], and share of right facts of a caption.
    """
    sides, start = tuple(NFIGConfig().patch_nums), Path(start)
    shown = [sample_scene(seed + index, profile=IMAGE_TOKENS) for index in range(scenes)]
    pixels, texts = image_pixels(shown, IMAGE_SIZE), list(map(caption, shown))
    judge = AttributeJudge.of_model(start)
    cells = VQModel.from_pretrained(start / VQ, torch_dtype=torch.float32)
    bands: Any = BandVQModel.from_pretrained(folder, torch_dtype=torch.float32)
    codes = bands.encode(pixels, sides)
    decoded = {}
    for count in kept:
        tokens = sum(side**2 for side in sides[:count])
        lower = codes.index_fill(1, torch.arange(tokens, codes.shape[1]), -1)
        decoded[f"{count} bands, {tokens} tokens"] = bands.decode(bands.quantize.features(lower, sides))
    decoded["cells"] = decode_tokens(cells, encode_image(cells, pixels))
    decoded["no quantisation"] = bands.decode(bands.quant_conv(bands.encoder(pixels)))

    def scored(images: Tensor) -> list[Estimate]:
        errors = (images.clamp(-1, 1) - pixels).square().mean((1, 2, 3))
        facts = judge.facts((images / 2 + 0.5).clamp(0, 1), texts)
        right = torch.tensor([[sum(seen for _, seen in row), len(row)] for row in facts])

        def statistics(rows: Tensor) -> list[float]:
            seen, stated = right[rows].sum(0).tolist()
            return [float(errors[rows].mean()), seen / stated]

        error, share = jackknife(statistics, scenes)
        return [error, as_share(share, scenes)]

    return {name: scored(images) for name, images in decoded.items()}
