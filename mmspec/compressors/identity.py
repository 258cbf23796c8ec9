"""Every visual token: what compression is measured against."""

from __future__ import annotations

from torch import Tensor

from mmspec.compressors.interface import Compressor, VisualTokens

__all__ = ["Identity"]


class Identity(Compressor):
    """C = N."""

    def __init__(self, width: int) -> None:
        super().__init__(width, tokens=None)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        return images
