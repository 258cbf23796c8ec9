"""Low-confidence remasking: the most confident places are decided, all others stay masked."""

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
    """Decide the most confident places (2502.09992, section 2.4); exact with one place per forward pass.

    As in MaskGIT (2202.04200). The confidence is the probability of the chosen token in the output
    distribution, that is after temperature and truncation; for LLaDA, as in its code, in the model's own
    distribution. Each row ranks its own places; of equal ones the leftmost is decided.

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
        denoising_steps: number of forward passes for a block, instead of `places_per_step`. Each decides an
            equal share, and the first ones decide one place more if there is a remainder (SDAR's
            `low_confidence_static`, 2510.06303); from `places_per_step` if None.

    Raises:
        InputError: a value outside its range, or both `denoising_steps` and `places_per_step`.
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
            raise InputError("denoising_steps", steps, "must be a positive integer, or None")
        if steps is not None and self.places_per_step > 1:
            rule = "cannot be combined with places_per_step; each determines the other"
            raise InputError("denoising_steps", steps, rule)

    def choose(self, places: Places) -> Tensor:
        if self.denoising_steps is None:
            return torch.zeros_like(places.is_open)
        return places.order < quota(places, self.denoising_steps)


def quota(places: Places, steps: int) -> Tensor:
    """[B, 1] number of places to decide in this step if a block takes `steps` steps, evenly distributed."""
    size = places.exists.sum(-1, keepdim=True)
    share, rest = size // steps, size % steps
    step = torch.where(
        places.decided < rest * (share + 1),
        places.decided // (share + 1),
        (places.decided - rest) // share.clamp_min(1),
    )
    return share + (step < rest)
