"""The image tokenizer of NFIG (2503.07076): VAR's, which quantises bands of frequency instead of scales."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import torch
from torch import Tensor

from mmspec.families.var.tokenizer import ScaleQuantizer, ScaleVQModel, shrunk

__all__ = ["BandVQModel", "band_edges", "low_pass", "quantise_bands"]

CORNER = 0.5**0.5  # the largest frequency, of both directions together, in cycles per cell


def band_edges(sides: Sequence[int]) -> list[float]:
    """Return the upper edge of each band as a share of the largest frequency: its share of the tokens."""
    counts = list(accumulate(side**2 for side in sides))
    return [count / counts[-1] for count in counts]


def low_pass(features: Tensor, edge: float) -> Tensor:
    """Return features [B, c, P, P] without frequencies above a share of the largest one."""
    side = features.shape[-1]
    down = torch.fft.fftfreq(side, dtype=torch.float64, device=features.device)
    across = torch.fft.rfftfreq(side, dtype=torch.float64, device=features.device)
    kept = torch.hypot(down[:, None], across) <= edge * CORNER * (1 + 1e-9)
    passed: Tensor = torch.fft.irfft2(torch.fft.rfft2(features) * kept, s=(side, side))
    return passed


def quantise_bands(
    quantizer: ScaleQuantizer, features: Tensor, sides: Sequence[int]
) -> tuple[Tensor, Tensor]:
    """Quantise features [B, c, P, P], each band with what the bands below it have left.

    Returns:
        Codes [B, N] of all bands, and the sum of their vectors.
    """
    total, found = torch.zeros_like(features), list[Tensor]()
    for band, (side, edge) in enumerate(zip(sides, band_edges(sides), strict=True)):
        seen = shrunk(low_pass(features, edge) - total, side).detach()
        codes = quantizer.embedding.weight.detach()
        found.append(torch.cdist(seen, codes.expand(len(seen), -1, -1)).argmin(-1))
        total = total + quantizer.vectors(found[-1], sides, band)
    return torch.cat(found, 1), total


class BandVQModel(ScaleVQModel):
    """Image tokenizer that quantises bands of frequency. It takes the arguments of `ScaleVQModel`."""

    def encode(self, pixels: Tensor, sides: Sequence[int]) -> Tensor:
        """Encode images [B, 3, H, W] in [-1, 1] to codes [B, N], the lowest band first."""
        return quantise_bands(self.quantize, self.quant_conv(self.encoder(pixels)), sides)[0]
