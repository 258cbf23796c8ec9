"""Ascending steps (ASS): every forward pass decides twice as many places as the one before."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmspec.places.policies import Places
from mmspec_extras.methods.end_weight.policy import EndWeight


@dataclass(frozen=True)
class Ascending(EndWeight):
    """Decides the surest 1, 2, 4, ... places, and the rest in the last of log2(n) steps (ASS, 2509.23924).

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
        end_weight: see `EndWeight`; the weight grows with the number of decided places.
    """

    end_weight: float = 0.01

    def grown(self, places: Places) -> Tensor:
        return ((2 * (places.decided + 1) - 1) / 2 ** self.steps(places)).clamp_max(1.0)

    def steps(self, places: Places) -> Tensor:
        """[B, 1] number of forward passes for a block."""
        size = places.exists.sum(-1, keepdim=True)
        return (size.double().log2() + 1e-9).floor().clamp_min(1.0)

    def choose(self, places: Places) -> Tensor:
        count = places.decided + 1
        is_last = count >= 2 ** (self.steps(places) - 1)
        return (self.order(places) < count) | is_last
