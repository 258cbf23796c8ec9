"""Bases of drafters: a session for every batch, and a smaller model that many of them run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmspec.core.interfaces import Drafter, DraftSession, PromptOutput, Request, list_prompts
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import AnySampler

__all__ = ["ModelDrafter", "PromptBatch", "SessionDrafter"]


@dataclass(frozen=True)
class PromptBatch:
    """A batch whose prompts the target has read; attributes as the arguments of `Drafter.start`."""

    requests: Sequence[Request]
    prefill: PromptOutput
    sampler: AnySampler
    random: RandomStream

    @property
    def prompts(self) -> list[Mapping[str, Tensor]]:
        """The R prompts that the target reads for B requests."""
        return list_prompts(self.requests, self.sampler)


class SessionDrafter(Drafter):
    """Base of drafters that open a session of one class for every batch.

    Attributes:
        session: makes the session of this drafter and a batch.
    """

    session: Callable[[Any, PromptBatch], DraftSession]

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: AnySampler, random: RandomStream
    ) -> DraftSession:
        return self.session(self, PromptBatch(requests, prefill, sampler, random))


class ModelDrafter(SessionDrafter):
    """Base of drafters with a smaller model.

    Attributes:
        model: behind the Target interface.
    """

    model: Any

    @property
    def modules(self) -> Sequence[nn.Module]:
        return (self.model.model,)

    def to(self, *args: object, **kwargs: object) -> None:
        self.model = type(self.model)(self.model.model.to(*args, **kwargs))

    def compile(self) -> None:
        if self.model.steps is None:
            self.model.compile()
