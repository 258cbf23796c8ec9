"""Canvases of noise: blocks whose places all hold tokens, and are decided together after their last step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torch import Tensor

from mmspec.core.draft import Block
from mmspec.core.verdict import Fill

__all__ = ["CanvasBlock", "CanvasFill"]


@dataclass(frozen=True)
class CanvasBlock(Block):
    """Canvas of each row, as L lanes of one node.

    Attributes:
        steps: [B] steps of it that are left, this one included.
        past: [B, H, L] likeliest tokens in the last H steps; -1 where there was none.
        begins: output index of each canvas; None for rows that are finished.
    """

    steps: Tensor
    past: Tensor
    begins: Sequence[int | None]


@dataclass(frozen=True)
class CanvasFill(Fill):
    """Canvas of each row after a step, whether or not it is decided.

    Attributes:
        canvas: [B, L] tokens of the next step.
        logits: [B, L, V] as this step sampled from them, which the next one may be told.
    """

    canvas: Tensor
    logits: Tensor
