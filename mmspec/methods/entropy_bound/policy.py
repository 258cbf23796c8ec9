"""Entropy bound: decides together the places whose entropies add up to at most a bound."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmspec.places.policies import PlaceRule, Places, entropy, rank, within
from mmspec.validation import require_number


@dataclass(frozen=True)
class EntropyBound(PlaceRule):
    """Decides the places of the lowest entropy, as long as the entropies before each sum to at most a bound.

    The error of deciding places together is at most the sum of their entropies without the largest
    (EB-Sampler, 2505.24857). The rule keeps this sum below the bound, in nats, in every round; there is no
    bound over several rounds. The place of the lowest entropy is always decided, instead of the surest.

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
        entropy_bound: largest sum of entropies in nats, 0 or more; a larger bound decides more places.
    """

    entropy_bound: float = 0.1

    by_token = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("entropy_bound", self.entropy_bound, 0.0, 1e6, "must be at least 0 nats")

    def order(self, places: Places) -> Tensor:
        return rank(-open_entropy(places))

    def choose(self, places: Places) -> Tensor:
        return within(open_entropy(places), self.entropy_bound)


def open_entropy(places: Places) -> Tensor:
    """[B, n] entropy in nats at the open places; infinite elsewhere."""
    return entropy(places.logits).masked_fill(~places.is_open, float("inf"))
