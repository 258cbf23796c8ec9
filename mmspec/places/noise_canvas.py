"""Noise canvases: blocks in which all places hold tokens, decided together after the last step."""

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
        steps: [B] number of remaining steps, this one included.
        past: [B, H, L] most likely tokens in the last H steps; -1 for missing steps.
        begins: output index of each canvas; None for finished rows.
    """

    steps: Tensor
    past: Tensor
    begins: Sequence[int | None]


@dataclass(frozen=True)
class CanvasFill(Fill):
    """Canvas of each row after a step, decided or not.

    Attributes:
        canvas: [B, L] tokens of the next step.
        logits: [B, L, V] that this step sampled from, a possible input of the next step.
    """

    canvas: Tensor
    logits: Tensor
