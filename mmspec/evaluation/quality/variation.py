"""Total variation between a decoding order's distributions and the target's, measured at every cell.

A cell that was decoded before its whole context was known has been drawn from another distribution than in
raster order. Both are known afterwards: one from the forward that decided it, the other from one forward over
the finished image.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from mmspec.acceleration import Accelerator
from mmspec.decoding.image_grid import FREE
from mmspec.decoding.interfaces import Request
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.sequences import Emission, Sequences
from mmspec.evaluation.identity.distribution import read_distributions

__all__ = ["VariationMeter", "with_meter"]


@dataclass
class RecordingTarget:
    """A target that records the first logits of each place, which are those that decide its token.

    Attributes:
        target: the real one.
        logits: place -> [B, V] logits; [2B, V] under guidance.
    """

    target: Any
    logits: dict[int, Tensor] = field(default_factory=dict)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.target, name)

    def score_places(self, state: Any, tokens: Tensor, places: Tensor, visible: Tensor) -> Tensor:
        """Score places by the target, and record the logits; rows of a batch have the same places."""
        logits: Tensor = self.target.score_places(state, tokens, places, visible)
        for node, place in enumerate(places[0].tolist()):
            self.logits.setdefault(place, logits[:, node])
        return logits


@dataclass(frozen=True)
class VariationMeter(Accelerator):
    """An accelerator with a fixed decoding order that measures total variation when a batch is finished.

    It goes into the batch's stats, after the last emission: callers that time emissions do not see it.

    Attributes:
        measured: output index of a cell -> its total variation in each image. The first cell follows the
            prompt, whose distribution is the target's.
    """

    measured: dict[int, list[float]] = field(default_factory=dict)

    def decode(
        self,
        target: Any,
        sampler: Sampler,
        requests: Sequence[Request],
        sequences: Sequences,
        random: RandomStream,
    ) -> Iterator[Emission]:
        recording = RecordingTarget(target)
        yield from super().decode(recording, sampler, requests, sequences, random)
        for row, (request, output) in enumerate(zip(requests, sequences.outputs(), strict=True)):
            distribution = read_distributions(target, sampler, request, output)
            for place, recorded in recording.logits.items():
                cell = place + 1
                if cell < len(output) and (request.grid is None or request.grid.forced[cell] == FREE):
                    logits = sampler.guided(recorded[row :: len(requests), None])
                    drawn_from = sampler.warped(logits).probabilities()[0, 0]
                    distance = float((drawn_from - distribution[cell]).abs().sum() / 2)
                    self.measured.setdefault(cell, []).append(distance)
                    sequences.stats.count_variation(distance, distance, 1)


def with_meter(accelerator: Accelerator) -> Accelerator:
    """Return an accelerator that measures its total variation, with a meter where it needs one.

    Rules measure their own while they judge, and are left as they are. So are adaptive decoding orders: a
    token that was on trial has been drawn from two distributions.
    """
    if accelerator.order is None or accelerator.order.adaptive:
        return accelerator
    return VariationMeter(**vars(accelerator))
