"""Compressor: fewer visual tokens for the drafter. The target always sees all of them.

An image (or a frame of a clip) is a row of its own, so images cannot mix, however many a prompt has.
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
    """A module that makes C tokens of the N tokens of each image.

    What it must hold to, and `tests/contracts` check of every registered one: C is known without
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
        """Compress each image for its question.

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
