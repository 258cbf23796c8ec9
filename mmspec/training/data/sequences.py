"""Interface of training data: whole sequences of prompt and answer, in the form of the target's inputs.

A data source returns equal sequences for equal steps, so that a resumed run and an uninterrupted one train on
the same sequences. It does not depend on the drafter.
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
        inputs: keyword arguments of the target, as in a `Request`: `input_ids` [1, L] of prompt and answer.
        answer: index of the first token of the answer.
        only: [L] True at the learnt tokens; None for all tokens from `answer` on.
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
        """Return a copy with every tensor on the device."""
        inputs = {name: value.to(device) for name, value in self.inputs.items()}
        return replace(self, inputs=inputs, only=None if self.only is None else self.only.to(device))


@dataclass(frozen=True)
class DrafterBatch:
    """The sequences of a step, and the seed of its random numbers."""

    examples: tuple[TrainingExample, ...]
    seed: int

    def to(self, device: torch.device) -> Self:
        """Return a copy with every tensor on the device."""
        moved = (example.to(device) for example in self.examples)
        return replace(self, examples=tuple(moved))


@dataclass(frozen=True)
class TensorBatch:
    """Base class of batches whose fields are all tensors."""

    def to(self, device: torch.device) -> Self:
        """Return a copy with every tensor on the device."""
        return type(self)(*(getattr(self, each.name).to(device) for each in fields(self)))


@dataclass(frozen=True)
class Trial:
    """Held-out prompts, with their decoding settings."""

    requests: Sequence[Request]
    sampler: Sampler
    new_tokens: int
    end_token_ids: frozenset[int] = frozenset()


class DrafterData(Protocol):
    """Protocol of a source of training sequences."""

    def batch(self, step: int, process: int) -> DrafterBatch:
        """Return the sequences of a step and training process."""

    def trial(self) -> Trial:
        """Return the held-out prompts."""


class PromptData(Protocol):
    """Protocol of a source of prompts, from which the target draws its own training images."""

    def prompts(self, step: int, process: int) -> Trial:
        """Return the prompts of a step and training process."""


def acceptance_length(target: CausalTarget, drafter: Drafter, trial: Trial) -> float:
    """Measure the tokens per forward pass, by decoding the trial with an exact acceptance rule."""
    return decode(target, drafter, trial).stats.acceptance_length


@torch.no_grad()
def decode(target: CausalTarget, drafter: Drafter, trial: Trial, seed: int = 0) -> Canvas:
    """Decode the trial with an exact acceptance rule: the output does not depend on the drafter."""
    stopping = Stopping(trial.new_tokens, trial.end_token_ids)
    random = RandomStream.from_seed(seed, len(trial.requests), target.device)
    accelerator = pair("trial", drafter.fit(target)).with_length("fixed")  # does not depend on measured times
    call = accelerator.call(target, trial.sampler, trial.requests, stopping, random)
    for _ in call.rounds():
        pass
    return call.canvas
