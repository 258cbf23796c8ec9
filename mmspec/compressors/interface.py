"""Compressor interface: fewer visual tokens for the drafter. The target always processes all of them.

Each image, or frame of a clip, is a separate row, so that images cannot mix.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from torch import Tensor, nn

from mmspec.errors import InputError
from mmspec.validation import is_integer
from mmspec.visual_tokens.tokens import VisualTokens

__all__ = ["Compressor", "check_tokens"]

MAX_TOKENS = 4096


class Compressor(nn.Module, ABC):
    """Module that compresses the N tokens of each image to C tokens.

    Requirements, which `tests/contracts` checks for every registered compressor: C does not depend on the
    features; padding has no effect; an image depends only on itself and its question; gradients reach the
    features that were kept and all parameters.

    Args:
        width: d of the features.
        tokens: C; None if C = N.

    Attributes:
        summarises: True if it returns a summary with the tokens, which the drafter must use.
    """

    summarises: ClassVar[bool] = False

    def __init__(self, width: int, tokens: int | None) -> None:
        super().__init__()
        self.width = width
        self.tokens = tokens

    @abstractmethod
    def forward(self, images: VisualTokens, question: Tensor) -> VisualTokens:
        """Compress each image for its question.

        Args:
            images: [P, N, d]; P may be 0.
            question: [P, d] the prompt's question about each image, in the same space: its last row.
                Compressors may ignore it.

        Returns:
            [P, C, d], padded if an image has fewer tokens than are kept.
        """


def check_tokens(tokens: int) -> int:
    """Raise InputError unless `tokens` is an integer from 1 to 4096."""
    if not is_integer(tokens) or not 1 <= tokens <= MAX_TOKENS:
        raise InputError("tokens", tokens, f"must be an integer from 1 to {MAX_TOKENS} per image")
    return tokens
