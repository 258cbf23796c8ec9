"""Total variation between the distributions that cells were drawn from and the target's, at every cell.

A cell that was decoded before its whole context was known has been drawn from another distribution than in
raster order. Both are known afterwards: one from the round that decided it, the other from one forward over
the finished image.
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
    """Measures the total variation of one batch, whose rounds it watches.

    Attributes:
        drawn_from: row and output index -> [V] the distribution that the token was drawn from.
    """

    drawn_from: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def watch(self, step: Round) -> None:
        """Record the distributions of the tokens that a round decided."""
        verdict, p = step.verdict, step.scores.p
        if isinstance(verdict, Path):
            p = pick(p, verdict.nodes)  # a value is drawn from what the node before it says
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
        """Measure a batch that is finished; the figures go into its stats."""
        canvas = call.canvas
        for row, (request, output) in enumerate(zip(call.requests, canvas.outputs(), strict=True)):
            sampler = call.sampler.part([row])
            distribution = read_distributions(call.target, sampler, request, output)
            for place in range(1, len(output)):  # the first one's distribution is the prompt's own
                drawn_from, layout = self.drawn_from.get((row, place)), request.layout
                if drawn_from is None or (layout is not None and layout.forced[place] != FREE):
                    continue
                distance = float((drawn_from - distribution[place]).abs().sum() / 2)
                canvas.stats.count_measured("tv", distance, distance, 1)


def needs_meter(accelerator: Accelerator) -> bool:
    """True if nodes see less than the model would; rules measure their own total variation as they judge."""
    return accelerator.drafter.exactness == "lossy"


@dataclass
class OverlapMeter:
    """Measures how much the chains of draft and target have in common, where both denoise.

    Of q's chains the mean of min(1, p / q) is 1 minus their total variation: what the best rule that judges
    whole chains accepts. Candidates right behind what is emitted alone count, which were drafted from the
    very context that they are judged in.

    Attributes:
        total, places: sum and number of the measured overlaps.
    """

    total: float = 0.0
    places: int = 0

    @torch.inference_mode()
    def watch(self, step: Round) -> None:
        """Measure the first candidates of a round; other drafts than drawn chains are passed over."""
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
        """1 minus the total variation of the chains; None where nothing was measured."""
        return self.total / self.places if self.places else None
