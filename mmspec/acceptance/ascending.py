"""Ascending steps: twice as many places in every forward; and end tokens that come late (EOSER and ASS)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.acceptance.places import PlaceRule, Places, rank
from mmspec.validation import require_number


@dataclass(frozen=True)
class EndWeight(PlaceRule):
    """Decide the surest places; confidences of end tokens have a weight that grows to 1 (EOSER, 2509.23924).

    A model that was trained to fill what is behind an answer with end tokens is surest of those, and would
    decide them first.

    Args:
        places_per_step, remask_below, end_cut, fallback: as of `PlaceRule`.
        end_weight: the weight at the beginning; 1 changes nothing.
    """

    end_weight: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("end_weight", self.end_weight, 0.0, 1.0, "a share, 0 to 1")

    def grown(self, places: Places) -> Tensor:
        """[B, 1] how much of the way to 1 the weight has gone."""
        return (places.progress - 1 / places.length).clamp(0.0, 1.0)

    def order(self, places: Places) -> Tensor:
        weight = self.end_weight + (1 - self.end_weight) * self.grown(places)
        return rank(places.confidence * torch.where(places.is_end & places.is_open, weight, 1.0))

    def choose(self, places: Places) -> Tensor:
        return torch.zeros_like(places.is_open)


@dataclass(frozen=True)
class Ascending(EndWeight):
    """Decide 1, 2, 4, ... of the surest places, and the rest in the last of log2(n) steps (ASS, 2509.23924).

    Args:
        places_per_step, remask_below, end_cut, fallback: as of `PlaceRule`.
        end_weight: as of `EndWeight`; it grows as the steps do.
    """

    end_weight: float = 0.01

    def grown(self, places: Places) -> Tensor:
        return ((2 * (places.decided + 1) - 1) / 2 ** self.steps(places)).clamp_max(1.0)

    def steps(self, places: Places) -> Tensor:
        """[B, 1] forwards that a block takes."""
        size = places.exists.sum(-1, keepdim=True)
        return (size.double().log2() + 1e-9).floor().clamp_min(1.0)

    def choose(self, places: Places) -> Tensor:
        count = places.decided + 1
        is_last = count >= 2 ** (self.steps(places) - 1)
        return (self.order(places) < count) | is_last
