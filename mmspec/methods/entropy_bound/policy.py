"""Entropy bound: as many places as have little to say of each other."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from mmspec.places.policies import PlaceRule, Places, entropy, rank, within
from mmspec.validation import require_number


@dataclass(frozen=True)
class EntropyBound(PlaceRule):
    """Decide the places of the lowest entropy, as long as those before each sum to at most a bound.

    The error of deciding places at once is at most the sum of their entropies but the largest (EB-Sampler,
    2505.24857), which this keeps below the bound, in nats, in every round; nothing bounds it over several.
    The place of the lowest entropy is always decided, in the place of the surest.

    Args:
        places_per_step, remask_below, end_cut, fallback: as of `PlaceRule`.
        entropy_bound: in nats; larger decides more.
    """

    entropy_bound: float = 0.1

    by_token = False

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("entropy_bound", self.entropy_bound, 0.0, 1e6, "nats, 0 or more")

    def order(self, places: Places) -> Tensor:
        return rank(-open_entropy(places))

    def choose(self, places: Places) -> Tensor:
        return within(open_entropy(places), self.entropy_bound)


def open_entropy(places: Places) -> Tensor:
    """[B, n] nats at the open places; infinitely many elsewhere."""
    return entropy(places.logits).masked_fill(~places.is_open, float("inf"))
