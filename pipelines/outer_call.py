"""Calls of transformers' `generate` or of a diffusers pipeline that mmspec's loop decodes."""

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
    """A call of another library, the `owner`: its arguments and its output format."""

    owner: ClassVar[str]

    @abstractmethod
    def prepare(self, method: FoundMethod, seed: int | None) -> Call:
        """Set up the decoding of all rows; an error names an argument that mmspec's loop does not support."""

    @abstractmethod
    def carry_out(self, call: Call) -> Output:
        """Decode to the end and return the output in the owner's format."""

    @abstractmethod
    def by_owner(self) -> Output:
        """Decode by the owner's loop."""

    def passed_on(self, reason: Exception) -> Output:
        """Decode by the owner's loop, and log the reason."""
        logger.info("passed on to %s: %s", self.owner, reason)
        return self.by_owner()

    def decode(
        self, method: FoundMethod, seed: int | None, keep: Callable[[DecodingStats], None], passes_on: bool
    ) -> Output:
        """Decode by mmspec's loop, or by the owner's if it is unsupported and `passes_on` is true.

        Args:
            method: the accelerator.
            seed: seed for sampling; None draws one.
            keep: receives the statistics.
            passes_on: decode by the owner's loop instead of raising an error.

        Raises:
            InputError, UnsupportedModelError: mmspec's loop does not support an argument or the model.
            NumericalError: the logits of a row are not finite.
        """
        try:
            call = self.prepare(method, seed)
        except (InputError, UnsupportedModelError) as error:
            if not passes_on:
                raise
            return self.passed_on(error)
        output = self.carry_out(call)
        keep(call.stats)
        return output


def filled(rows: Sequence[list[int]], filler: int, device: torch.device, multiple: int = 1) -> Tensor:
    """Join rows of tokens to [B, L], padded on the right to a multiple of a length."""
    longest = max(map(len, rows))
    width = longest + -longest % multiple
    return torch.tensor(
        [row + [filler] * (width - len(row)) for row in rows], dtype=torch.long, device=device
    )
