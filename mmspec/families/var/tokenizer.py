"""The image tokenizer of VAR (2404.02905): codes of several scales, whose sum is decoded.

A scale's codes are looked up, enlarged to the size of the last scale by bicubic interpolation, smoothed by a
convolution, and added. Encoder and decoder are those of diffusers' `VQModel`. Every call takes the tokens per
side of the scales, because checkpoints lack them.
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

SMOOTHED = 0.5  # share of the convolution in the result


class ScaleQuantizer(nn.Module):
    """Quantiser of several scales, whose vectors are added.

    Args:
        codes: entries K of the codebook.
        width: width c of a vector.
        convolutions: number of convolutions; each scale uses the nearest one.
    """

    def __init__(self, codes: int, width: int, convolutions: int = 4) -> None:
        super().__init__()
        self.embedding = nn.Embedding(codes, width)
        self.smoothing = nn.ModuleList(nn.Conv2d(width, width, 3, padding=1) for _ in range(convolutions))

    def convolution_of(self, scale: int, scales: int) -> nn.Module:
        """Return the convolution of a scale, the one with the nearest relative position."""
        count = len(self.smoothing)
        edge = 1 / (3 if count == 4 else 2) / count
        # bit for bit as published: rounding decides between two equally near ones for two of ten scales
        ticks = np.linspace(edge, 1 - edge, count)
        return self.smoothing[int(np.argmin(np.abs(ticks - scale / max(scales - 1, 1))))]

    def vectors(self, codes: Tensor, sides: Sequence[int], scale: int) -> Tensor:
        """Return the vectors [B, c, P, P] of the codes [B, p * p] of a scale; P is the last of the sides."""
        side = sides[scale]
        found = self.embedding(codes).transpose(1, 2).unflatten(2, (side, side))
        if scale < len(sides) - 1:
            found = F.interpolate(found, size=(sides[-1], sides[-1]), mode="bicubic")
        smooth: Tensor = self.convolution_of(scale, len(sides))(found)
        mixed: Tensor = found * (1 - SMOOTHED) + smooth * SMOOTHED
        return mixed

    def features(self, codes: Tensor, sides: Sequence[int]) -> Tensor:
        """Return the summed vectors [B, c, P, P] of codes [B, N] of all scales; scales of -1 are skipped."""
        total = self.nothing(len(codes), sides)
        for scale, part in enumerate(codes.split([side**2 for side in sides], 1)):
            is_there = (part >= 0).all(1)[:, None, None, None]
            total = total + self.vectors(part.clamp_min(0), sides, scale) * is_there
        return total

    def nothing(self, rows: int, sides: Sequence[int]) -> Tensor:
        """Return zeros [B, c, P, P], to which scales are added."""
        weight = self.embedding.weight
        return weight.new_zeros(rows, weight.shape[1], sides[-1], sides[-1])

    def encode(self, features: Tensor, sides: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Quantise vectors [B, c, P, P], each scale the residual of the scales before.

        Returns:
            Codes [B, N] of all scales, and the sum of their vectors.
        """
        rest, found = features, []
        for scale, side in enumerate(sides):
            seen = shrunk(rest, side)
            distances = torch.cdist(seen, self.embedding.weight.expand(len(seen), -1, -1))
            found.append(distances.argmin(-1))
            rest = rest - self.vectors(found[-1], sides, scale)
        return torch.cat(found, 1), features - rest


def shrunk(features: Tensor, side: int) -> Tensor:
    """Average vectors [B, c, P, P] over the cells of a grid with p = `side` cells per side, [B, p * p, c]."""
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
        """Encode images [B, 3, H, W] in [-1, 1] to codes [B, N], the coarsest scale first."""
        return self.quantize.encode(self.quant_conv(self.encoder(pixels)), sides)[0]

    def decode(self, features: Tensor) -> Tensor:
        """Decode summed vectors [B, c, P, P] to images [B, 3, H, W], in about [-1, 1]."""
        pixels: Tensor = self.decoder(self.post_quant_conv(features))
        return pixels
