"""What drafters learn from: whole sequences, prompt and answer, as their target reads them.

Knows nothing of drafters. A source of data gives equal sequences for equal steps, so that a resumed run sees
what an uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from mmspec.acceptance.matching import SampleAndMatch
from mmspec.decoding.interfaces import Drafter, Request
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.sequences import Sequences, Stopping
from mmspec.decoding.speculative import speculate
from mmspec.decoding.stats import DecodingStats
from mmspec.targets import CausalTarget

__all__ = ["DrafterBatch", "DrafterData", "Example", "Trial", "acceptance_length"]


@dataclass(frozen=True)
class Example:
    """One sequence.

    Attributes:
        inputs: the target's keyword arguments, as of a request: `input_ids` [1, L] of prompt and answer.
        answer: index of the answer's first token.
    """

    inputs: dict[str, Tensor]
    answer: int


@dataclass(frozen=True)
class DrafterBatch:
    """The sequences of a step, and the number that its noise is drawn from."""

    examples: tuple[Example, ...]
    seed: int

    def to(self, device: torch.device) -> Self:
        """The same with every tensor on that device."""
        moved = [
            replace(example, inputs={name: value.to(device) for name, value in example.inputs.items()})
            for example in self.examples
        ]
        return replace(self, examples=tuple(moved))


@dataclass(frozen=True)
class Trial:
    """Held-out prompts, and how they are decoded."""

    requests: Sequence[Request]
    sampler: Sampler
    new_tokens: int


class DrafterData(Protocol):
    """A source of sequences."""

    def batch(self, step: int, process: int) -> DrafterBatch:
        """The sequences of a step, in one of the processes that train."""

    def trial(self) -> Trial:
        """Held-out prompts."""


@torch.no_grad()
def acceptance_length(target: CausalTarget, drafter: Drafter, trial: Trial) -> float:
    """Tokens committed per forward of the target, by decoding the trial with exact acceptance."""
    stats = DecodingStats()
    rows = len(trial.requests)
    prompts = [request.prompt_tokens for request in trial.requests]
    sequences = Sequences(prompts, Stopping(trial.new_tokens), stats, target.device)
    random = RandomStream.from_seed(0, rows, target.device)
    roles = (target, drafter.fit(target), SampleAndMatch(), trial.sampler)
    for _ in speculate(*roles, trial.requests, sequences, random):
        pass
    return stats.acceptance_length
