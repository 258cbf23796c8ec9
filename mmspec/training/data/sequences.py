"""Training data of drafters: whole sequences, prompt and answer, as their target reads them.

Knows nothing of drafters. A source of data gives equal sequences for equal steps, so that a resumed run sees
what an uninterrupted one would have seen.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Protocol, Self

import torch
from torch import Tensor

from mmspec.accelerator import pair
from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.interfaces import Drafter, Request
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.targets import CausalTarget

__all__ = [
    "DrafterBatch",
    "DrafterData",
    "PromptData",
    "TensorBatch",
    "TrainingExample",
    "Trial",
    "acceptance_length",
    "decode",
]


@dataclass(frozen=True)
class TrainingExample:
    """One training sequence.

    Attributes:
        inputs: the target's keyword arguments, as of a request: `input_ids` [1, L] of prompt and answer.
        answer: index of the answer's first token.
        only: [L] True at the learnt tokens, where they are not all from `answer` on: of several turns.
    """

    inputs: dict[str, Tensor]
    answer: int
    only: Tensor | None = None

    @property
    def learnt(self) -> Tensor:
        """[L] True at the tokens that a drafter learns to predict."""
        if self.only is not None:
            return self.only
        ids = self.inputs["input_ids"][0]
        return torch.arange(len(ids), device=ids.device) >= self.answer

    def to(self, device: torch.device) -> Self:
        """The same with every tensor on that device."""
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, only=None if self.only is None else self.only.to(device))


@dataclass(frozen=True)
class DrafterBatch:
    """The sequences of a step, and the seed of its noise."""

    examples: tuple[TrainingExample, ...]
    seed: int

    def to(self, device: torch.device) -> Self:
        """The same with every tensor on that device."""
        moved = (example.to(device) for example in self.examples)
        return replace(self, examples=tuple(moved))


@dataclass(frozen=True)
class TensorBatch:
    """Base of batches whose fields are all tensors."""

    def to(self, device: torch.device) -> Self:
        """The same with every tensor on that device."""
        return type(self)(*(getattr(self, each.name).to(device) for each in fields(self)))


@dataclass(frozen=True)
class Trial:
    """Held-out prompts, with the settings that they are decoded with."""

    requests: Sequence[Request]
    sampler: Sampler
    new_tokens: int
    end_token_ids: frozenset[int] = frozenset()


class DrafterData(Protocol):
    """A source of sequences."""

    def batch(self, step: int, process: int) -> DrafterBatch:
        """The sequences of a step, in one of the processes that train."""

    def trial(self) -> Trial:
        """Held-out prompts."""


class PromptData(Protocol):
    """A source of prompts, for images that the target draws itself."""

    def prompts(self, step: int, process: int) -> Trial:
        """The prompts of a step, in one of the processes that train."""


def acceptance_length(target: CausalTarget, drafter: Drafter, trial: Trial) -> float:
    """Measure the tokens committed per target forward, by decoding the trial with exact acceptance."""
    return decode(target, drafter, trial).stats.acceptance_length


@torch.no_grad()
def decode(target: CausalTarget, drafter: Drafter, trial: Trial, seed: int = 0) -> Canvas:
    """Decode the trial with exact acceptance: the target's own output, whichever drafter is used."""
    stopping = Stopping(trial.new_tokens, trial.end_token_ids)
    random = RandomStream.from_seed(seed, len(trial.requests), target.device)
    accelerator = pair("trial", drafter.fit(target)).with_length("fixed")  # whatever else the machine does
    call = accelerator.call(target, trial.sampler, trial.requests, stopping, random)
    for _ in call.rounds():
        pass
    return call.canvas
