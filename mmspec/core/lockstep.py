"""Lock step: a request's callbacks are called as transformers' `generate` calls them.

They are called once a step with all rows at once, padded before shorter prompts and after finished rows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import LogitsProcessorList, StoppingCriteriaList

__all__ = ["Lockstep"]


@dataclass(frozen=True, eq=False)
class Lockstep:
    """Callbacks that rely on being called once per step, with one new token for each of the b rows.

    Attributes:
        processors: take ids [b, L] and scores [b, V].
        criteria: take ids [b, L + 1] after the step.
        prompt_lengths: of the b rows.
        filler: the padding token.
    """

    processors: LogitsProcessorList
    criteria: StoppingCriteriaList
    prompt_lengths: tuple[int, ...]
    filler: int

    def batch(self, rows: Sequence[Sequence[int]], device: torch.device) -> Tensor:
        """Build the padded batch [b, L] of the rows' ids, prompts included."""
        lengths = self.prompt_lengths
        longest = max(lengths)
        most = max(len(ids) - length for ids, length in zip(rows, lengths, strict=True))
        padded = [
            [self.filler] * (longest - length) + [*ids] + [self.filler] * (most + length - len(ids))
            for ids, length in zip(rows, lengths, strict=True)
        ]
        return torch.tensor(padded, dtype=torch.long, device=device)

    def process(self, rows: Sequence[Sequence[int]], scores: Tensor) -> Tensor:
        """Process the next-token scores [b, V] of the rows: in a float32 copy, as `generate` does."""
        ids: Any = self.batch(rows, scores.device)
        processed: Tensor = self.processors(ids, scores.to(torch.float32, copy=True))
        return processed.to(scores.dtype)

    def stops(self, rows: Sequence[Sequence[int]], device: torch.device) -> list[bool]:
        """Return which rows the criteria end."""
        ids = self.batch(rows, device)
        asked: Tensor = self.criteria(ids, None)
        return list(asked.tolist())
