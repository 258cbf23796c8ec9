"""Keep the visual tokens that the question attends to most (as DREAM selects, 2505.19201)."""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import pad, rms_norm

from mmspec.compressors.interface import Compressor, VisualTokens, check_tokens

__all__ = ["AttentionPruning", "attended_most"]


def attended_most(images: VisualTokens, question: Tensor, tokens: int) -> tuple[Tensor, Tensor]:
    """Which tokens to keep: indices [P, C] in reading order, and where there is one at all.

    The score is the question's dot product with each normalised token. DREAM reads the attention maps of
    the target's last layer instead, which only eager attention gives.
    """
    count = images.features.shape[1]
    scores = (rms_norm(images.features, (question.shape[-1],)) @ question[..., None])[..., 0]
    kept = min(tokens, count)
    index = scores.masked_fill(~images.mask, float("-inf")).topk(kept, dim=-1).indices
    index = index.where(images.mask.gather(1, index), count).sort(-1).values  # padding goes last
    mask = index < count
    missing = (0, tokens - kept)
    return pad(index.where(mask, 0), missing), pad(mask, missing)


class AttentionPruning(Compressor):
    """The C tokens with the highest score, unchanged and in reading order.

    Args:
        width: d, of the features.
        tokens: C.
    """

    def __init__(self, width: int, tokens: int = 64) -> None:
        super().__init__(width, check_tokens(tokens))
        self.kept = tokens

    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        return images.take(*attended_most(images, question, self.kept))
