"""A call of code that is not ours, decoded by our loop: of `generate`, or of a pipeline with its own loop."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from mmspec.accelerator import Call
from mmspec.core.interfaces import Round
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.pipelines.drafter import FoundMethod

__all__ = ["OuterCall", "filled"]

logger = logging.getLogger(__name__)


class OuterCall(ABC):
    """A call whose arguments and output have the form of the code that was called, its owner."""

    owner: ClassVar[str]

    @abstractmethod
    def prepare(self, method: FoundMethod, seed: int | None) -> Call:
        """Set up the decoding of all rows; nothing is read yet.

        Raises:
            InputError: something that the caller gave would not act; its name is in the message.
            UnsupportedModelError: the model cannot be decoded so.
        """

    @abstractmethod
    def rounds(self, call: Call) -> Iterator[Round]:
        """Decode to the end, in sight of the caller."""

    @abstractmethod
    def output(self, call: Call) -> Any:
        """Put what was decoded into the form of the owner."""

    @abstractmethod
    def by_owner(self) -> Any:
        """Decode by the loop of the owner; returns its output."""

    def decode(
        self, method: FoundMethod, seed: int | None, keep: Callable[[DecodingStats], None], passes_on: bool
    ) -> Any:
        """Decode by our loop, and `keep` the statistics; return the output of the owner.

        What would not act in our loop is an error as of `prepare`, or (`passes_on`) decoded by the owner's.

        Raises:
            NumericalError: a row's logits are no numbers.
        """
        try:
            call = self.prepare(method, seed)
        except (InputError, UnsupportedModelError) as error:
            if not passes_on:
                raise
            logger.info("passed on to %s: %s", self.owner, error)
            return self.by_owner()
        for _ in self.rounds(call):
            pass
        call.raise_errors()
        keep(call.stats)
        return self.output(call)


def filled(rows: Sequence[list[int]], filler: int, device: torch.device, multiple: int = 1) -> Tensor:
    """Join rows of tokens to [B, L], padded on the right to a length that is such a multiple."""
    longest = max(map(len, rows))
    width = longest + -longest % multiple
    padded = [row + [filler] * (width - len(row)) for row in rows]
    return torch.tensor(padded, dtype=torch.long, device=device)
