"""No visual tokens at all: the target's features at the text rows carry the image (HiViS, 2509.23928)."""

from __future__ import annotations

from torch import Tensor

from mmspec.compressors.interface import Compressor, VisualTokens

__all__ = ["NoTokens"]


class NoTokens(Compressor):
    """C = 0."""

    def __init__(self, width: int) -> None:
        super().__init__(width, tokens=0)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        return VisualTokens.empty(images)
