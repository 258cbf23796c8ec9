"""Low-confidence remasking: the surest places are decided, all others stay masked."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from mmspec.core.promise import Level, Promise
from mmspec.errors import InputError
from mmspec.places.policies import PlaceRule, Places
from mmspec.validation import is_integer


@dataclass(frozen=True)
class LowConfidence(PlaceRule):
    """Decide the places whose tokens are the most probable (LLaDA, 2502.09992, section 2.4).

    After MaskGIT (2202.04200). The confidence is the probability of the chosen token: in the promised
    distribution, that is after temperature and truncation, or for LLaDA, as in its code, in the model's own.
    Each row ranks its own places; of equals the leftmost is decided.

    Args:
        places_per_step, remask_below, end_cut, fallback: as of `PlaceRule`.
        denoising_steps: forwards that a block takes, in place of `places_per_step`: each decides an equal
            share of it, the first ones a place more where that leaves a rest (SDAR's `low_confidence_static`,
            2510.06303; the paper's steps of a block).

    Raises:
        InputError: a value outside its range, or both a number of steps and of places a step.
    """

    denoising_steps: int | None = None

    @property
    def promise(self) -> Promise:
        lossy = self.places_per_step > 1 or self.remask_below or self.end_cut
        lossy = lossy or self.denoising_steps is not None
        return Promise(Level.LOSSY if lossy else Level.EXACT)

    def __post_init__(self) -> None:
        super().__post_init__()
        steps = self.denoising_steps
        if steps is not None and (not is_integer(steps) or steps < 1):
            raise InputError("denoising_steps", steps, "a positive integer, or None")
        if steps is not None and self.places_per_step > 1:
            raise InputError("denoising_steps", steps, "None beside places_per_step: one sets the other")

    def choose(self, places: Places) -> Tensor:
        if self.denoising_steps is None:
            return torch.zeros_like(places.is_open)
        return places.order < quota(places, self.denoising_steps)


def quota(places: Places, steps: int) -> Tensor:
    """[B, 1] places that this step decides where a block is decided in so many steps, as evenly as can be."""
    size = places.exists.sum(-1, keepdim=True)
    share, rest = size // steps, size % steps
    step = torch.where(
        places.decided < rest * (share + 1),
        places.decided // (share + 1),
        (places.decided - rest) // share.clamp_min(1),
    )
    return share + (step < rest)
