"""Compressors that keep some of the visual tokens, unchanged and in reading order."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize, pad, rms_norm

from mmspec.compressors.interface import Compressor, check_tokens
from mmspec.visual_tokens.tokens import VisualTokens

__all__ = ["AttentionPruning", "SimilarityPruning", "attended_most", "most_diverse"]


def attended_most(images: VisualTokens, question: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """[P, C] indices of the tokens with the most attention of the question, in reading order; which exist.

    The score is the dot product of the question with each normalised token. DREAM uses the attention maps of
    the target's last layer instead, which only eager attention returns.
    """
    count = images.features.shape[1]
    scores = (rms_norm(images.features, (question.shape[-1],)) @ question[..., None])[..., 0]
    kept = min(tokens, count)
    index = scores.masked_fill(~images.mask, float("-inf")).topk(kept, dim=-1).indices
    index = index.where(images.mask.gather(1, index), count).sort(-1).values  # padding comes last
    mask = index < count
    missing = (0, tokens - kept)
    return pad(index.where(mask, 0), missing), pad(mask, missing)


def most_diverse(images: VisualTokens, tokens: int) -> tuple[Tensor, Tensor]:
    """[P, C] indices of the most diverse tokens, in reading order, and which of them exist.

    Starts from the token least similar to the mean of its image, and repeatedly adds the one whose nearest
    kept neighbour is farthest, by cosine. DivPrune starts from the farthest pair, which needs all N * N
    similarities; here a step costs N.
    """
    unit = normalize(images.features, dim=-1)
    rows, count, _ = unit.shape
    mean = (unit * images.mask[..., None]).sum(1)
    nearest = (unit @ mean[..., None])[..., 0]
    free = images.mask.clone()
    chosen = []
    each = torch.arange(rows, device=unit.device)
    for step in range(min(tokens, count)):
        pick = nearest.masked_fill(~free, float("inf")).argmin(-1)
        chosen.append(pick.where(free[each, pick], count))  # an image may have fewer tokens
        free[each, pick] = False
        similarity = (unit @ unit[each, pick][..., None])[..., 0]
        nearest = similarity if step == 0 else torch.maximum(nearest, similarity)
    chosen += [torch.full_like(each, count)] * (tokens - len(chosen))
    index = torch.stack(chosen, 1).sort(-1).values
    mask = index < count
    return index.where(mask, 0), mask


class Pruning(Compressor):
    """Base of compressors that keep C of the tokens."""

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__(width, check_tokens(tokens))
        self.kept = tokens


class AttentionPruning(Pruning):
    """Keeps the C tokens with the most attention of the question (as DREAM, 2505.19201)."""

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        return images.take(*attended_most(images, question, self.kept))


class SimilarityPruning(Pruning):
    """Keeps the C most diverse tokens, independent of the question (DivPrune, 2503.02175)."""

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        with torch.no_grad():
            index, mask = most_diverse(images, self.kept)
        return images.take(index, mask)
