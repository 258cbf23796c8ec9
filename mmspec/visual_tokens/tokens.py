"""The visual tokens of several images, padded into one tensor."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

__all__ = ["VisualTokens"]


@dataclass(frozen=True)
class VisualTokens:
    """Visual tokens of P images, padded to the image with the most.

    Attributes:
        features: [P, N, d].
        mask: [P, N] True where there is a token.
        boxes: [P, N, 4] float32, where in the image it lies (`boxes.py`).
        summary: [P, d] one vector for the whole image, for drafters that hand it to every text row
            (ViSpec's global vector); None from all other compressors.
    """

    features: Tensor
    mask: Tensor
    boxes: Tensor
    summary: Tensor | None = None

    def take(self, index: Tensor, mask: Tensor) -> VisualTokens:
        """The tokens at `index` [P, C]; those that `mask` [P, C] does not name are padding."""
        rows = torch.arange(len(index), device=index.device)[:, None]
        kept = self.features[rows, index].where(mask[..., None], 0.0)
        return VisualTokens(kept, mask, self.boxes[rows, index].where(mask[..., None], 0.0))

    def padded(self, tokens: int) -> VisualTokens:
        """The same with room for that many tokens an image; `tokens` is at least N."""
        more = tokens - self.features.shape[1]
        return VisualTokens(
            pad(self.features, (0, 0, 0, more)), pad(self.mask, (0, more)), pad(self.boxes, (0, 0, 0, more))
        )
