"""Compressors by attention: learned queries or latent vectors attend to the visual tokens."""

from __future__ import annotations

import torch
from einops import rearrange
from torch import Tensor, nn
from torch.nn.functional import rms_norm, scaled_dot_product_attention

from mmspec.compressors.interface import Compressor, check_tokens
from mmspec.errors import InputError
from mmspec.visual_tokens.tokens import BOX, VisualTokens, whole

__all__ = ["Latent", "QueryAttention", "Resampler", "ViSpec"]


class QueryAttention(nn.Module):
    """Multi-head cross-attention whose queries are parameters; the number of heads must divide the width."""

    def __init__(self, width: int, queries: int, heads: int, bias: bool = False) -> None:
        super().__init__()
        if heads < 1 or width % heads:
            raise InputError("heads", heads, f"must divide the width {width}")
        head_width = width // heads
        self.queries = nn.Parameter(torch.randn(heads, queries, head_width) * head_width**-0.5)
        self.k_proj = nn.Linear(width, width, bias=bias)
        self.v_proj = nn.Linear(width, width, bias=bias)
        self.o_proj = nn.Linear(width, width, bias=False)

    def forward(self, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        """[P, N, d] keys and values, [P, N] mask -> [P, queries, d]."""
        k, v = (
            rearrange(projected, "p n (heads width) -> p heads n width", heads=len(self.queries))
            for projected in (self.k_proj(keys), self.v_proj(values))
        )
        q = self.queries.expand(len(keys), -1, -1, -1)
        attended = scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None])
        output: Tensor = self.o_proj(rearrange(attended, "p heads q width -> p q (heads width)"))
        return output


def compress_latent(queries: Tensor, features: Tensor, mask: Tensor) -> Tensor:
    """softmax(A norm(F)^T / sqrt(d)) F: [C, d], [P, N, d] and [P, N] -> [P, C, d].

    The paper has neither the norm nor the scale; without them the softmax is one-hot at d = 4096, and the
    gradient to the queries vanishes.
    """
    width = features.shape[-1]
    scores: Tensor = queries @ rms_norm(features, (width,)).mT * width**-0.5
    return scores.masked_fill(~mask[:, None], float("-inf")).softmax(-1) @ features


class Latent(Compressor):
    """FLASH's latent-aware compression: C mixtures of each image's tokens (2505.12728, section 3.2)."""

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__(width, check_tokens(tokens))
        self.queries = nn.Parameter(torch.randn(tokens, width))  # scores have initial variance 1

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        latent = compress_latent(self.queries, images.features, images.mask)
        mask = images.mask.new_ones(latent.shape[:2])
        return VisualTokens(latent, mask, whole(latent))


class Resampler(Compressor):
    """SpecVLM's Resampler: one cross-attention layer with box embeddings in its keys (2509.11815).

    Unlike `latent`, which mixes the tokens themselves, it computes new features, with 4 d^2 weights.
    """

    def __init__(self, width: int, tokens: int = 2, heads: int = 1) -> None:
        super().__init__(width, check_tokens(tokens))
        self.place = nn.Linear(BOX, width, bias=False)
        self.attention = QueryAttention(width, tokens, heads)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        values = rms_norm(images.features, (self.width,))
        sampled = self.attention(values + self.place(images.boxes.to(values)), values, images.mask)
        return VisualTokens(sampled, images.mask.new_ones(sampled.shape[:2]), whole(sampled))


class ViSpec(Compressor):
    """ViSpec's image adaptor: C tokens, and a summary for all text rows up to the next image (2509.15235).

    The paper has one token; keys and values have biases in the release for Qwen2.5-VL.
    """

    summarises = True

    def __init__(self, width: int, tokens: int = 1, heads: int = 1, bias: bool = False) -> None:
        super().__init__(width, check_tokens(tokens))
        self.attention = QueryAttention(width, tokens + 1, heads, bias)

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        queried = self.attention(images.features, images.features, images.mask)
        tokens, summary = queried[:, :-1], queried[:, -1]
        return VisualTokens(tokens, images.mask.new_ones(tokens.shape[:2]), whole(tokens), summary)
