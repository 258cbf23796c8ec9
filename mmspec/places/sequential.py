"""Sequential rule: the leftmost open places are decided."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.places.policies import PlaceRule, Places


@dataclass(frozen=True)
class Sequential(PlaceRule):
    """Decide the leftmost open places, `places_per_step` of them (`sequential` of SDAR, 2510.06303).

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
    """

    by_token = False

    def order(self, places: Places) -> Tensor:
        return places.leftmost

    def choose(self, places: Places) -> Tensor:
        return torch.zeros_like(places.is_open)
