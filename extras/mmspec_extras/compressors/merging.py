"""Compressor that merges similar visual tokens."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.compressors.interface import Compressor, check_tokens
from mmspec.visual_tokens.tokens import VisualTokens
from mmspec_extras.compressors.similarity import merge_vectors, most_similar

__all__ = ["Merging", "merge_once"]


def merge_once(images: VisualTokens, weights: Tensor, tokens: int) -> tuple[VisualTokens, Tensor]:
    """Replace the most similar pairs of tokens by their means, in one step of bipartite soft matching.

    Each token at an even place is paired with the most similar token at an odd place. The most similar pairs
    are merged until `tokens` are left, at most half of an image's tokens (ToMe, 2210.09461).

    Args:
        images: [P, N, d], N > tokens; padding last.
        weights: [P, N] float32, number of original tokens that each is the mean of.
        tokens: number of tokens that should be left.

    Returns:
        The images [P, max(tokens, ceil(N / 2)), d], in reading order, and their weights.
    """
    left = max(tokens, -(-images.mask.shape[1] // 2))
    with torch.no_grad():
        even, odd = images.features[:, 0::2], images.features[:, 1::2]
        similarity, partner = most_similar(even, odd, images.mask[:, 1::2])
        similarity = similarity.where(images.mask[:, 0::2], float("-inf"))
        order = similarity.argsort(dim=-1, descending=True, stable=True)
        rank = order.argsort(-1)  # among the pairs
        count = images.mask.sum(-1, keepdim=True)
        surplus = torch.minimum(count - tokens, count // 2)
        merged = torch.zeros_like(images.mask)
        merged[:, 0::2] = rank < surplus
        place = (images.mask & ~merged).cumsum(-1) - 1  # among those that stay
        target = place.where(images.mask, -1)
        target[:, 0::2] = torch.where(merged[:, 0::2], place.gather(1, 2 * partner + 1), target[:, 0::2])
        boxes, total = merge_vectors(images.boxes, weights, target, left)
    features, _ = merge_vectors(images.features, weights, target, left)
    return VisualTokens(features, total > 0, boxes), total


class Merging(Compressor):
    """C tokens, each the mean of similar tokens, without the question (ToMe's matching, 2210.09461).

    ToMe merges a few tokens in each layer of the encoder, by their attention keys. Here its matching compares
    the tokens themselves, and halves their number until C are left. The box of a merged token is the mean of
    the boxes of its tokens.
    """

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__(width, check_tokens(tokens))
        self.left = tokens

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        weights = images.mask.float()
        while images.mask.shape[1] > self.left:
            images, weights = merge_once(images, weights, self.left)
        return images.padded(self.left)
