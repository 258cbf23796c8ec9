"""FLASH's latent-aware compression: learned queries gather what is alike (2505.12728, section 3.2)."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from mmspec.compressors.interface import Compressor, VisualTokens, check_tokens
from mmspec.compressors.query_attention import masked_softmax
from mmspec.visual_tokens.boxes import whole

__all__ = ["Latent", "compress_latent"]


def compress_latent(queries: Tensor, features: Tensor, mask: Tensor) -> Tensor:
    """softmax(A norm(F)^T / sqrt(d)) F: [C, d], [P, N, d] and [P, N] -> [P, C, d].

    The paper has neither the norm nor the scale; without them the softmax is one-hot at d = 4096, and the
    gradient to the queries vanishes.
    """
    width = features.shape[-1]
    scores = queries @ rms_norm(features, (width,)).mT * width**-0.5
    return masked_softmax(scores, mask[:, None]) @ features


class Latent(Compressor):
    """C mixtures of each image's tokens, whatever their number and order.

    Args:
        width: d, of the features.
        tokens: C.
    """

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__(width, check_tokens(tokens))
        self.queries = nn.Parameter(torch.randn(tokens, width))  # scores of variance one at first

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        latent = compress_latent(self.queries, images.features, images.mask)
        mask = images.mask.new_ones(latent.shape[:2])
        return VisualTokens(latent, mask, whole(latent))
