"""MaskGIT's rule: decides the open cells of an image whose tokens are the surest."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch

from mmspec.core.distributions import Scores
from mmspec.core.interfaces import AnyRule, TargetOutput
from mmspec.core.promise import Level
from mmspec.core.random_stream import Purpose, RandomStream
from mmspec.core.verdict import Fill, Measured, Verdict
from mmspec.places.policies import rank
from mmspec.validation import require_number

__all__ = ["MaskGIT"]


@dataclass(frozen=True)
class MaskGIT(AnyRule):
    """Draws a token for every open cell, and decides the surest ones (MaskGIT, 2202.04200, section 3.2).

    The confidence of a token is the logarithm of its probability in the promised distribution, plus Gumbel
    noise that decreases to 0 over the iterations. The drafter sets the number of decided cells. Tokens that
    are not decided are dropped, and drawn again in the next forward pass. Lossy, without a bound: the model
    defines no distribution of whole images to compare with.

    Args:
        choice_temperature: factor of the noise of the confidence before the first iteration, 0 to 10000,
            which falls linearly; 0 ranks by probabilities alone.

    Raises:
        InputError: `choice_temperature` is out of range.
    """

    choice_temperature: float = 4.5

    exactness = Level.LOSSY

    def __post_init__(self) -> None:
        require_number("choice_temperature", self.choice_temperature, 0.0, 1e4, "must be between 0 and 10000")

    def decide(
        self, draft: Any, output: TargetOutput, scores: Scores, random: RandomStream, first: torch.Tensor
    ) -> tuple[Verdict, Measured]:
        cells = draft
        shape, fresh = cells.starts.shape, random.at(random.round)
        token = scores.sample(fresh, first[:, None], Purpose.REDRAW).view(shape)
        finite = scores.is_finite().view(shape)
        log_p = scores.logits.view(*shape, -1).log_softmax(-1).gather(-1, token[..., None])[..., 0]
        # the share of cells left is a cosine of the share of the iterations
        left = (shape[1] - cells.quota) / cells.completes
        heat = self.choice_temperature * (1 - 2 / math.pi * math.acos(left))
        noise = fresh.gumbel(first[:, None], Purpose.ACCEPT, 1, scores.dtype).view(shape)
        confidence = (log_p + heat * noise).masked_fill(~finite, float("-inf"))
        decided = (rank(confidence) < cells.quota) & finite
        failed = ~finite.any(-1)
        nothing = torch.zeros_like(decided)
        return Fill.of(cells.starts, token, decided, nothing, failed), Measured.nothing(decided)
