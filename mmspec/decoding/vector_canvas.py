"""Output of a batch of continuous tokens on the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas, Stopping
from mmspec.decoding.stats import DecodingStats


class VectorCanvas(Canvas):
    """Output of a batch of continuous tokens. The vectors stay on the device; the host is told their number.

    Args:
        size: d of a vector.
        dtype: of its numbers.
    """

    def __init__(
        self,
        prompts: Sequence[list[int]],
        stopping: Stopping,
        stats: DecodingStats,
        device: torch.device,
        size: int,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        super().__init__(prompts, stopping, stats, device)
        self._lay_out(torch.zeros(len(prompts), size, dtype=dtype, device=device))  # a prompt ends in an id

    def outputs(self) -> list[Any]:
        """B tensors [N, d] of output vectors."""
        return [row[:count] for row, count in zip(self.tokens, self.output_lengths, strict=True)]

    def _are_ends(self, tokens: Tensor) -> Tensor:
        return torch.zeros_like(tokens[..., 0], dtype=torch.bool)

    def _readable(self, tokens: Tensor) -> list[Tensor]:
        return []

    def _extend(self, row: int, count: int, block: list[int], reason: str | None) -> Any:
        start = self.output_lengths[row]
        self.finish_reasons[row] = reason
        return self.tokens[row, start : start + count]
