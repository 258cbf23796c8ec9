"""Confidence threshold: every place that is sure enough is decided."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmspec.places.policies import PlaceRule, Places
from mmspec.validation import require_number


@dataclass(frozen=True)
class Threshold(PlaceRule):
    """Decide every place whose token is at least so probable, and the surest in any case.

    Fast-dLLM (2505.22618). For greedy decoding of n places with confidences above 1 - e, the likeliest tokens
    of each place are the likeliest of all together if (n + 1) e <= 1 (theorem 1 there); nothing bounds it at
    a temperature. With `places_per_step` this is `low_confidence_dynamic` of SDAR (2510.06303), which
    compares by ">".

    Args:
        places_per_step, remask_below, end_cut, fallback: as of `PlaceRule`.
        threshold: least probability of a token; above 1 decides the surest alone.
    """

    threshold: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("threshold", self.threshold, 0.0, 2.0, "a probability, or more to decide one a step")

    def choose(self, places: Places) -> Tensor:
        return places.confidence >= self.threshold
