"""Compressor that merges visual tokens which are alike."""

from __future__ import annotations

import torch
from torch import Tensor

from mmspec.compressors.interface import Compressor, check_tokens
from mmspec.visual_tokens.tokens import VisualTokens
from mmspec_extras.compressors.similarity import merge_vectors, most_similar

__all__ = ["Merging", "merge_once"]


def merge_once(images: VisualTokens, weights: Tensor, tokens: int) -> tuple[VisualTokens, Tensor]:
    """A step of bipartite soft matching: the most similar pairs become their means.

    Each token at an even place is paired with the most similar one at an odd place, and the most similar
    pairs are merged: as many as leave `tokens`, at most half of an image's tokens.

    Args:
        images: [P, N, d], N > tokens; padding last.
        weights: [P, N] float32, of how many tokens each is the mean.
        tokens: how many should be left.

    Returns:
        The images, [P, max(tokens, ceil(N / 2)), d], in reading order, and their weights.
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
    """C tokens, means of tokens that are alike; no question needed (ToMe's matching, 2210.09461).

    ToMe merges a few tokens in each layer of the encoder, by their attention keys; here its matching halves
    the tokens of an image until C are left, by the tokens themselves. A merged token's box is the mean of
    theirs.
    """

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__(width, check_tokens(tokens))
        self.left = tokens

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        weights = images.mask.float()
        while images.mask.shape[1] > self.left:
            images, weights = merge_once(images, weights, self.left)
        return images.padded(self.left)
