"""ViSpec's image adaptor: one token per image and one vector for all text after it (2509.15235)."""

from __future__ import annotations

from torch import Tensor

from mmspec.compressors.interface import Compressor, VisualTokens, check_tokens
from mmspec.compressors.query_attention import QueryAttention
from mmspec.visual_tokens.boxes import whole

__all__ = ["ViSpec"]


class ViSpec(Compressor):
    """C tokens, and a summary that the drafter adds to every text row up to the next image.

    Args:
        width: d, of the features.
        tokens: C; the paper has 1.
        heads: a divisor of the width.
    """

    summarises = True

    def __init__(self, width: int, tokens: int = 1, heads: int = 1) -> None:
        super().__init__(width, check_tokens(tokens))
        self.attention = QueryAttention(width, tokens + 1, heads)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        queried = self.attention(images.features, images.features, images.mask)
        tokens, summary = queried[:, :-1], queried[:, -1]
        return VisualTokens(tokens, images.mask.new_ones(tokens.shape[:2]), whole(tokens), summary)
