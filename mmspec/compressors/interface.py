"""Compressor: fewer visual tokens for the drafter. The target always sees all of them.

An image (or a frame of a clip) is a row of its own, so images cannot mix, however many a prompt has.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from mmspec.decoding.sampling import is_integer
from mmspec.errors import InputError

__all__ = ["Compressor", "VisualTokens", "check_tokens"]

MAX_TOKENS = 4096


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

    @classmethod
    def empty(cls, like: VisualTokens) -> VisualTokens:
        """No token of any image."""
        return cls(like.features[:, :0], like.mask[:, :0], like.boxes[:, :0])


class Compressor(nn.Module, ABC):
    """Makes C tokens of the N tokens of each image.

    What it must hold to, and `tests/compressors` check of every registered one: C is known without
    looking at the features; padding changes nothing; an image depends on itself and its question alone;
    gradients reach the features that were kept and all parameters.

    Args:
        width: d, of the features.
        tokens: C; None where as many come out as went in.

    Attributes:
        summarises: True if it gives a summary beside the tokens, which its drafter has to make use of.
    """

    summarises: ClassVar[bool] = False

    def __init__(self, width: int, tokens: int | None) -> None:
        super().__init__()
        self.width = width
        self.tokens = tokens

    @abstractmethod
    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        """Compress.

        Args:
            images: [P, N, d]; P may be 0.
            question: [P, d] what the prompt wants to know of each image, in the same space: its last
                row. Compressors that do not look at it ignore it.

        Returns:
            [P, C, d]. Where an image has fewer tokens than are kept, the rest is padding.
        """


def check_tokens(tokens: int) -> int:
    """Raise InputError unless `tokens` is an integer from 1 to 4096."""
    if not is_integer(tokens) or not 1 <= tokens <= MAX_TOKENS:
        raise InputError("tokens", tokens, f"an integer from 1 to {MAX_TOKENS} per image")
    return tokens
