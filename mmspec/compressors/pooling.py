"""Average pooling over the image's own grid (SpecVLM's Pool, 2509.11815), for any grid."""

from __future__ import annotations

from torch import Tensor

from mmspec.compressors.cells import pool
from mmspec.compressors.interface import Compressor, VisualTokens, check_tokens
from mmspec.visual_tokens.boxes import square_grid

__all__ = ["Pooling"]


class Pooling(Compressor):
    """C cells of a grid that is as square as C allows.

    Args:
        width: d, of the features.
        tokens: C.
    """

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__(width, check_tokens(tokens))
        self.grid = square_grid(tokens)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        return pool(images, *self.grid)
