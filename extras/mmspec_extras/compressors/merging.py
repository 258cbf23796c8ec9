"""Compressor that merges similar visual tokens."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmspec.compressors.interface import Compressor, check_tokens
from mmspec.visual_tokens.tokens import VisualTokens

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
        unit = [
            normalize(each.to(torch.promote_types(each.dtype, torch.float32)), dim=-1) for each in (even, odd)
        ]
        both = images.mask[:, 0::2, None] & images.mask[:, None, 1::2]
        similarity, partner = (unit[0] @ unit[1].mT).masked_fill(~both, float("-inf")).max(-1)
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


def merge_vectors(values: Tensor, weights: Tensor, target: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Return the weighted means of the vectors that are merged into the same slot.

    Args:
        values: [P, N, d].
        weights: [P, N] float32, positive.
        target: [P, N] int64 slot of each vector, from 0 to count - 1; -1 for none.
        count: number of slots, C.

    Returns:
        mean: [P, C, d]; zero where nothing was merged.
        total: [P, C] float32 sums of the weights.
    """
    precise = torch.promote_types(values.dtype, torch.float32)
    kept = target >= 0
    slot, weight = target.where(kept, 0), weights.where(kept, 0.0)
    total = torch.zeros_like(weights[:, :1]).expand(-1, count).scatter_add(1, slot, weight)
    share = (weight / total.gather(1, slot).where(kept, 1.0)).to(precise)
    parts = (share[..., None] * values.to(precise)).where(kept[..., None], 0.0)
    mean = values.new_zeros(len(values), count, values.shape[-1], dtype=precise)
    mean = mean.scatter_add(1, slot[..., None].expand_as(values), parts)
    return mean.to(values.dtype), total


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
