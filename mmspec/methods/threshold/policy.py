"""Confidence threshold: decides every place whose token is probable enough."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmspec.places.policies import PlaceRule, Places
from mmspec.validation import require_number


@dataclass(frozen=True)
class Threshold(PlaceRule):
    """Decides every place whose token has at least that probability, and the surest place in any case.

    Fast-dLLM (2505.22618). For greedy decoding of n places with confidences above 1 - e, the likeliest tokens
    of each place are also the likeliest jointly if (n + 1) e <= 1 (theorem 1 there); there is no bound at
    other temperatures. With `places_per_step` this is `low_confidence_dynamic` of SDAR (2510.06303), which
    compares by ">".

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
        threshold: least probability of a token, 0 to 2; above 1 only the surest place is decided.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "must be a probability, or up to 2 to decide one place a step"
        require_number("threshold", self.threshold, 0.0, 2.0, rule)

    def choose(self, places: Places) -> Tensor:
        return places.confidence >= self.threshold
