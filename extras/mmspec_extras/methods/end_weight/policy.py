"""EOSER: the confidence of end tokens has a weight that grows to 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.places.policies import PlaceRule, Places, rank
from mmspec.validation import require_number


@dataclass(frozen=True)
class EndWeight(PlaceRule):
    """Decides the surest places; confidences of end tokens have a weight that grows to 1 (EOSER, 2509.23924).

    A model that was trained to fill the places after an answer with end tokens is most confident of these,
    and would decide them first.

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
        end_weight: weight at the beginning; 1 changes nothing.
    """

    end_weight: float = 0.4

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("end_weight", self.end_weight, 0.0, 1.0, "must be between 0 and 1")

    def grown(self, places: Places) -> Tensor:
        """[B, 1] progress of the weight from `end_weight` (0) to 1 (1)."""
        return (places.progress - 1 / places.length).clamp(0.0, 1.0)

    def order(self, places: Places) -> Tensor:
        weight = self.end_weight + (1 - self.end_weight) * self.grown(places)
        return rank(places.confidence * torch.where(places.is_end & places.is_open, weight, 1.0))

    def choose(self, places: Places) -> Tensor:
        return torch.zeros_like(places.is_open)
