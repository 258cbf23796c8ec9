"""Drop visual tokens that look like others: keep the most diverse set (DivPrune, 2503.02175)."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import normalize

from mmspec.compressors.interface import Compressor, VisualTokens, check_tokens

__all__ = ["SimilarityPruning", "most_diverse"]


def most_diverse(images: VisualTokens, tokens: int) -> tuple[Tensor, Tensor]:
    """Which tokens to keep: indices [P, C] in reading order, and where there is one at all.

    Starts from the token least like the mean of its image and adds, again and again, the one whose
    nearest kept neighbour is farthest, by cosine. DivPrune starts from the farthest pair, at the cost of
    all N * N similarities; here a step costs N.
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


class SimilarityPruning(Compressor):
    """The C most diverse tokens, unchanged and in reading order; no question needed.

    Args:
        width: d, of the features.
        tokens: C.
    """

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__(width, check_tokens(tokens))
        self.kept = tokens

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        with torch.no_grad():
            index, mask = most_diverse(images, self.kept)
        return images.take(index, mask)
