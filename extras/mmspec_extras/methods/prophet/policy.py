"""Prophet: all that is open is decided at once, as soon as the model is sure of it on average."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.places.policies import PlaceRule, Places
from mmspec.validation import require_number


@dataclass(frozen=True)
class Prophet(PlaceRule):
    """Decide all open places of the block once their mean gap is large; the surest alone before (2508.19982).

    The gap of a place is the logit of its likeliest token less that of the second. The bar falls with the
    share of the output that is decided: `gap` below a third of it, two thirds of `gap` below two, then one
    third. The published rule looks at five places, which the caller names, of a prompt that ends in "The
    answer is"; this one at all open places of the block.

    Args:
        places_per_step, remask_below, end_cut, fallback: as of `PlaceRule`.
        gap: the first bar, in nats of logits; guidance and a temperature scale it.
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
