"""Forwards of a model, compiled: fewer launches and fused kernels for the same numbers, up to rounding."""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

__all__ = ["CompiledForward"]

logger = logging.getLogger(__name__)


class CompiledForward:
    """A forward compiled by torch.compile, once for all numbers of rows, nodes and cached tokens.

    Where the compiler fails, the logger says so, and the forward runs as it is from then on.

    Args:
        name: of the model, for the log.
        forward: returns logits, or what stands for them.
    """

    def __init__(self, name: str, forward: Callable[..., Tensor]) -> None:
        self.name, self._eager = name, forward
        self._compiled: Callable[..., Tensor] | None = torch.compile(forward, dynamic=True)

    def __call__(self, *args: Any, **kwargs: Any) -> Tensor:
        if self._compiled is None:
            return self._eager(*args, **kwargs)
        try:
            return self._compiled(*args, **kwargs)
        except torch._dynamo.exc.TorchDynamoException as error:
            logger.warning("%s runs without torch.compile: %s", self.name, " ".join(str(error).split())[:400])
            self._compiled = None
            return self._eager(*args, **kwargs)
