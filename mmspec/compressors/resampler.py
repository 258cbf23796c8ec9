"""A few learned queries look at the image once (SpecVLM's Resampler, 2509.11815: two of them)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from mmspec.compressors.interface import Compressor, VisualTokens, check_tokens
from mmspec.compressors.query_attention import QueryAttention
from mmspec.visual_tokens.boxes import BOX, whole

__all__ = ["Resampler"]


class Resampler(Compressor):
    """One layer of cross-attention with projections; keys know where in the image they lie.

    Unlike `latent`, which mixes the tokens themselves, it can say something of its own, and has 4 d^2
    weights to learn it.

    Args:
        width: d, of the features.
        tokens: C.
        heads: a divisor of the width.
    """

    def __init__(self, width: int, tokens: int = 2, heads: int = 1) -> None:
        super().__init__(width, check_tokens(tokens))
        self.place = nn.Linear(BOX, width, bias=False)
        self.attention = QueryAttention(width, tokens, heads)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        values = rms_norm(images.features, (self.width,))
        sampled = self.attention(values + self.place(images.boxes.to(values)), values, images.mask)
        return VisualTokens(sampled, images.mask.new_ones(sampled.shape[:2]), whole(sampled))
