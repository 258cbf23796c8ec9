"""Total variation between the distribution that each cell was drawn from and the target's.

A cell that is decoded before its whole context is known is drawn from another distribution than in raster
order. The round that decides the cell records one distribution, and one forward pass over the finished image
returns the other.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from mmspec.accelerator import Accelerator, Call
from mmspec.core.image_grid import FREE
from mmspec.core.indexing import pick
from mmspec.core.interfaces import Round
from mmspec.core.verdict import Path
from mmspec.evaluation.identity.distribution import read_distributions
from mmspec.vectors.denoising import Denoising, log_likelihood

__all__ = ["OverlapMeter", "VariationMeter", "needs_meter"]


@dataclass
class VariationMeter:
    """Measures the total variation of one batch from its rounds.

    Attributes:
        drawn_from: (row, output index) -> [V] the distribution that the token was drawn from.
    """

    drawn_from: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def watch(self, step: Round) -> None:
        """Record the distributions of the tokens that a round decided."""
        verdict, p = step.verdict, step.scores.p
        if isinstance(verdict, Path):
            p = pick(p, verdict.nodes)  # a value is drawn from the distribution of the node before it
            steps = torch.arange(p.shape[1], device=p.device)
            places, decided = step.first[:, None] + steps, steps < verdict.decided[:, None]
        else:
            p, places, decided = (
                p.reshape(len(verdict.places), -1, p.shape[-1]),
                verdict.places,
                verdict.decided,
            )
        for row, index in decided.nonzero().tolist():
            self.drawn_from[row, int(places[row, index])] = p[row, index].clone()

    def finish(self, call: Call) -> None:
        """Measure a finished batch and record the result in its stats."""
        canvas = call.canvas
        for row, (request, output) in enumerate(zip(call.requests, canvas.outputs(), strict=True)):
            sampler = call.sampler.part([row])
            distribution = read_distributions(call.target, sampler, request, output)
            for place in range(1, len(output)):  # prefill returns the distribution of the first token
                drawn_from, layout = self.drawn_from.get((row, place)), request.layout
                if drawn_from is None or (layout is not None and layout.forced[place] != FREE):
                    continue
                distance = float((drawn_from - distribution[place]).abs().sum() / 2)
                canvas.stats.count_measured("tv", distance, distance, 1)


def needs_meter(accelerator: Accelerator) -> bool:
    """True if nodes lack part of the model's context; rules measure their own total variation."""
    return accelerator.drafter.exactness == "lossy"


@dataclass
class OverlapMeter:
    """Measures the overlap of the denoising chains of draft and target.

    The mean of min(1, p / q) over chains from q is 1 minus their total variation: the largest acceptance rate
    of a rule that verifies whole chains. Only the first candidate of a round counts, since its context is the
    same for draft and target.

    Attributes:
        total, places: sum and number of the measured overlaps.
    """

    total: float = 0.0
    places: int = 0

    @torch.inference_mode()
    def watch(self, step: Round) -> None:
        """Measure the first candidates of a round; drafts without sampled chains are skipped."""
        q: Any = step.draft.q
        if not isinstance(q, Denoising) or q.drawn is None or not q.process.is_noisy:
            return
        p: Any = step.scores[:1]
        drafted = q[:1]
        chains = q.drawn[:, 0]
        ratio = log_likelihood(p.process, chains) - log_likelihood(drafted.process, chains)
        valid = step.draft.valid[:, 1]
        self.total += float((ratio.clamp_max(0).exp() * valid).sum())
        self.places += int(valid.sum())

    @property
    def mean(self) -> float | None:
        """1 minus the total variation of the chains; None without measurements."""
        return self.total / self.places if self.places else None
