"""Base classes of drafters: with a session per batch, and with a smaller model."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from mmspec.core.interfaces import Drafter, DraftSession, PromptOutput, Request, list_prompts
from mmspec.core.random_stream import RandomStream
from mmspec.core.rows import Rows, named
from mmspec.core.sampling import AnySampler

__all__ = ["ModelDrafter", "PromptBatch", "SessionDrafter"]


@dataclass(frozen=True)
class PromptBatch(Rows):
    """A prefilled batch; the attributes are the arguments of `Drafter.start`."""

    row_fields = named("requests", "prefill", "sampler", "random")

    requests: Sequence[Request]
    prefill: PromptOutput
    sampler: AnySampler
    random: RandomStream

    @property
    def prompts(self) -> list[Mapping[str, Tensor]]:
        """The R prompts of the target for B requests."""
        return list_prompts(self.requests, self.sampler)


class SessionDrafter(Drafter):
    """Base of drafters that start a session of one class for every batch.

    Attributes:
        session: creates the session of this drafter for a batch.
    """

    session: Callable[[Any, PromptBatch], DraftSession]

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: AnySampler, random: RandomStream
    ) -> DraftSession:
        return self.session(self, PromptBatch(requests, prefill, sampler, random))


class ModelDrafter(SessionDrafter):
    """Base of drafters with a smaller model.

    Attributes:
        model: the smaller model as a `Target`.
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
