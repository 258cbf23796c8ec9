"""Factor rule: the required confidence grows with the number of places that are decided together."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.places.policies import PlaceRule, Places
from mmspec.validation import require_number


@dataclass(frozen=True)
class Factor(PlaceRule):
    """Decides the n surest places, for the largest n with (n + 1) (1 - c_n) < f.

    Fast-dLLM (2505.22618), section 3.3; c_n is the n-th largest confidence. With f = 1 this is the condition
    of its theorem 1, under which the likeliest tokens of each place are also the likeliest jointly.

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
        factor: f; a larger value decides more places.
    """

    factor: float = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("factor", self.factor, 0.0, 1e6, "must be at least 0")

    def choose(self, places: Places) -> Tensor:
        surest = places.confidence.sort(dim=-1, descending=True).values
        count = torch.arange(2, surest.shape[1] + 2, device=surest.device)
        passes = (surest >= 0) & (count * (1 - surest) < self.factor)
        return places.order < passes.long().cumprod(-1).sum(-1, keepdim=True)
