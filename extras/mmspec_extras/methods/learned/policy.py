"""Learned rule: a trained filter predicts which places are final (Learn2PD, 2509.25188)."""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.core.interfaces import Target
from mmspec.errors import InputError
from mmspec.places.policies import PlaceRule, Places
from mmspec.validation import require_number
from mmspec_extras.methods.learned.filter import CommitFilter
from mmspec_extras.trained import copied_to, read_trained


@dataclass(frozen=True)
class Learned(PlaceRule):
    """Decides every place that a trained filter predicts to be final, and the surest place in any case.

    The filter reads the confidences of the block, with 1 for decided places. `mmspec-extras train-filter`
    trains one for a target.

    Args:
        places_per_step, remask_below, end_cut, fallback: see `PlaceRule`.
        filter: folder of a `CommitFilter`, or a loaded one.
        threshold: a place is decided if the filter's probability that its token is final is above this.

    Raises:
        InputError: a value is out of range; in `fit`, if there is no filter.
        CheckpointError: the filter cannot be read.
    """

    filter: Any = None
    threshold: float = 0.96
    model: CommitFilter | None = field(default=None, init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_number("threshold", self.threshold, 0.0, 2.0, "must be at least 0")
        if self.filter is not None:  # an unreadable folder should fail before the target is loaded
            object.__setattr__(self, "model", read_trained(CommitFilter, self.filter, "filter", "filter"))

    def fit(self, target: Target[Any]) -> Learned:
        fitted = copy.copy(self)
        object.__setattr__(fitted, "model", copied_to(target.device, self.model, "filter", "filter"))
        return fitted

    def choose(self, places: Places) -> Tensor:
        if self.model is None:
            raise TypeError("the rule must be fitted to a target first")
        size = self.model.config.block_length
        if places.token.shape[1] > size:
            rule = f"must be at most {size}, that of the filter"
            raise InputError("block_length", places.token.shape[1], rule)
        confidence = torch.where(places.is_open, places.confidence, 1.0)
        chosen: Tensor = self.model(confidence).sigmoid() > self.threshold
        return chosen
