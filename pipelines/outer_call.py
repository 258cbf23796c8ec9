"""Calls of code that is not ours, `generate` or a pipeline with a loop of its own, decoded by our loop."""

from __future__ import annotations

import logging
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from mmspec.accelerator import Call
from mmspec.core.statistics import DecodingStats
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.pipelines.drafter import FoundMethod

__all__ = ["OuterCall", "filled"]

logger = logging.getLogger(__name__)
Output = TypeVar("Output")


class OuterCall(ABC, Generic[Output]):
    """A call in the form of the code that was called, its `owner`: its arguments, and what it returns."""

    owner: ClassVar[str]

    @abstractmethod
    def prepare(self, method: FoundMethod, seed: int | None) -> Call:
        """Set up the decoding of all rows; an error names what the caller gave and what would not act."""

    @abstractmethod
    def carry_out(self, call: Call) -> Output:
        """Decode to the end, and put what was decoded into the form of the owner."""

    @abstractmethod
    def by_owner(self) -> Output:
        """Decode by the owner's loop."""

    def decode(
        self, method: FoundMethod, seed: int | None, keep: Callable[[DecodingStats], None], passes_on: bool
    ) -> Output:
        """Decode by our loop, and `keep` the statistics; or, if it `passes_on` what fails, by the owner's.

        Raises:
            InputError, UnsupportedModelError: something would not act in our loop, and is not passed on.
            NumericalError: a row's logits are no numbers.
        """
        try:
            call = self.prepare(method, seed)
        except (InputError, UnsupportedModelError) as error:
            if not passes_on:
                raise
            logger.info("passed on to %s: %s", self.owner, error)
            return self.by_owner()
        output = self.carry_out(call)
        keep(call.stats)
        return output


def filled(rows: Sequence[list[int]], filler: int, device: torch.device, multiple: int = 1) -> Tensor:
    """Join rows of tokens to [B, L], padded on the right to a length that is such a multiple."""
    longest = max(map(len, rows))
    width = longest + -longest % multiple
    return torch.tensor(
        [row + [filler] * (width - len(row)) for row in rows], dtype=torch.long, device=device
    )
