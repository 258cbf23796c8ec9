"""The image tokenizer of VAR (2404.02905): codes of several scales whose sum is decoded.

A scale's codes are looked up, enlarged to the size of the last by bicubic interpolation, smoothed by a
convolution, and added. Encoder and decoder are those of diffusers' `VQModel`. How many tokens a side the
scales have is said in every call: checkpoints do not.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from diffusers.configuration_utils import ConfigMixin, register_to_config
from diffusers.models.autoencoders.vae import Decoder, Encoder
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor, nn
from torch.nn import functional as F

from mmspec.open_types import Keywords

__all__ = ["ScaleQuantizer", "ScaleVQModel"]

SMOOTHED = 0.5  # share of the convolution in what it gives


class ScaleQuantizer(nn.Module):
    """Codes of several scales, and the vectors that they come to.

    Args:
        codes: entries of the codebook K.
        width: c of a vector.
        convolutions: that the scales share, each those nearest to it.
    """

    def __init__(self, codes: int, width: int, convolutions: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        self.smoothing = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(convolutions))

    def convolution_of(self, scale: int, scales: int) -> nn.Module:
        """The convolution of a scale: that whose share of the way is nearest."""
        count = len(self.smoothing)
        edge = 1 / (3 if count == 4 else 2) / count
        # as published, to the last bit: two scales of ten are as near to one as to another, but for rounding
        ticks = np.linspace(edge, 1 - edge, count)
        return self.smoothing[int(np.argmin(np.abs(ticks - scale / max(scales - 1, 1))))]

    def vectors(self, codes: Tensor, sides: Sequence[int], scale: int) -> Tensor:
        """Vectors [B, c, P, P] that the codes [B, p * p] of one scale add; P is the last of the sides."""
        side = sides[scale]
        found = self.embedding(codes).transpose(1, 2).unflatten(2, (side, side))
        if scale < len(sides) - 1:
            found = F.interpolate(found, size=(sides[-1], sides[-1]), mode="bicubic")
        smooth: Tensor = self.convolution_of(scale, len(sides))(found)
        mixed: Tensor = found * (1 - SMOOTHED) + smooth * SMOOTHED
        return mixed

    def features(self, codes: Tensor, sides: Sequence[int]) -> Tensor:
        """Vectors [B, c, P, P] that codes [B, N] of all scales come to; a scale of -1 adds nothing."""
        total = self.nothing(len(codes), sides)
        for scale, part in enumerate(codes.split([side**2 for side in sides], 1)):
            is_there = (part >= 0).all(1)[:, None, None, None]
            total = total + self.vectors(part.clamp_min(0), sides, scale) * is_there
        return total

    def nothing(self, rows: int, sides: Sequence[int]) -> Tensor:
        """Zeros [B, c, P, P], to which scales are added."""
        weight = self.embedding.weight
        return weight.new_zeros(rows, weight.shape[1], sides[-1], sides[-1])

    def encode(self, features: Tensor, sides: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Quantise vectors [B, c, P, P], scale by scale what is left of them.

        Returns:
            Codes [B, N] of all scales, and the vectors that they come to.
        """
        rest, found = features, []
        for scale, side in enumerate(sides):
            seen = shrunk(rest, side)
            distances = torch.cdist(seen, self.embedding.weight.expand(len(seen), -1, -1))
            found.append(distances.argmin(-1))
            rest = rest - self.vectors(found[-1], sides, scale)
        return torch.cat(found, 1), features - rest


def shrunk(features: Tensor, side: int) -> Tensor:
    """Means [B, p * p, c] of vectors [B, c, P, P] over the cells of a grid of so many a side."""
    return F.adaptive_avg_pool2d(features, side).flatten(2).transpose(1, 2)


class ScaleVQModel(ModelMixin, ConfigMixin):  # type: ignore[misc]  # both name their config
    """Image tokenizer of several scales; arguments as of diffusers' `VQModel`, and `convolutions`."""

    @register_to_config  # type: ignore[untyped-decorator]
    def __init__(
        self,
        down_block_types: Sequence[str] = ("DownEncoderBlock2D",),
        up_block_types: Sequence[str] = ("UpDecoderBlock2D",),
        block_out_channels: Sequence[int] = (64,),
        layers_per_block: int = 2,
        latent_channels: int = 32,
        num_vq_embeddings: int = 4096,
        convolutions: int = 4,
        norm_num_groups: int = 32,
    ) -> None:
        super().__init__()
        shape: Keywords = {
            "block_out_channels": tuple(block_out_channels),
            "layers_per_block": layers_per_block,
            "norm_num_groups": norm_num_groups,
        }
        self.encoder = Encoder(
            3, latent_channels, down_block_types=tuple(down_block_types), double_z=False, **shape
        )
        self.decoder = Decoder(latent_channels, 3, up_block_types=tuple(up_block_types), **shape)
        self.quantize = ScaleQuantizer(num_vq_embeddings, latent_channels, convolutions)
        self.quant_conv = nn.Conv2d(latent_channels, latent_channels, 3, padding=1)
        self.post_quant_conv = nn.Conv2d(latent_channels, latent_channels, 3, padding=1)

    def encode(self, pixels: Tensor, sides: Sequence[int]) -> Tensor:
        """Codes [B, N] of images [B, 3, H, W] in [-1, 1], the coarsest scale first."""
        return self.quantize.encode(self.quant_conv(self.encoder(pixels)), sides)[0]

    def decode(self, features: Tensor) -> Tensor:
        """Images [B, 3, H, W], about [-1, 1], of the vectors [B, c, P, P] that codes come to."""
        pixels: Tensor = self.decoder(self.post_quant_conv(features))
        return pixels
