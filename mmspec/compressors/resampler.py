"""A few learned queries look at the picture once (SpecVLM's Resampler, 2509.11815: two of them)."""

from __future__ import annotations

from torch import Tensor, nn
from torch.nn.functional import rms_norm

from mmspec.compressors.interface import Compressor, VisualTokens, check_tokens
from mmspec.compressors.query_attention import QueryAttention
from mmspec.visual_tokens.boxes import BOX, whole

__all__ = ["Resampler"]


class Resampler(Compressor):
    """One layer of cross-attention with projections; keys know where in the picture they lie.

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

    def forward(self, pictures: VisualTokens, question: Tensor) -> VisualTokens:
        values = rms_norm(pictures.features, (self.width,))
        sampled = self.attention(values + self.place(pictures.boxes.to(values)), values, pictures.mask)
        return VisualTokens(sampled, pictures.mask.new_ones(sampled.shape[:2]), whole(sampled))
