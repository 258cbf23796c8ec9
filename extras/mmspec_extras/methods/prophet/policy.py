"""Prophet: decides all open places at once as soon as the model is confident on average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.places.policies import PlaceRule, Places
from mmspec.validation import require_number


@dataclass(frozen=True)
class Prophet(PlaceRule):
    """Decides the surest places, and all open places of the block once their mean gap is large (2508.19982).

    The gap of a place is the logit of its likeliest token minus that of the second. The required mean gap
    falls with the decided share of the output: `gap` below one third, 2/3 `gap` below two thirds, then
    1/3 `gap`. The published rule reads five places, which the caller names, of a prompt that ends in "The
    answer is"; this rule reads all open places of the block.

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
        gap: first required gap, in nats; guidance and temperature scale the logits before.
    """

    gap: float = 7.5

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("gap", self.gap, 0.0, 1e6, "must be at least 0 (all at once)")

    def choose(self, places: Places) -> Tensor:
        best = places.logits.topk(2, dim=-1).values
        gaps = (best[..., 0] - best[..., 1]).where(places.is_open, 0.0)
        mean = gaps.sum(-1, keepdim=True) / places.is_open.sum(-1, keepdim=True).clamp_min(1)
        progress = places.progress
        third = torch.where(progress < 0.33, 3, torch.where(progress < 0.67, 2, 1))
        return (mean >= third * (self.gap / 3)).expand_as(places.is_open)
