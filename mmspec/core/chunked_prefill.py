"""Prefill in several forward passes, between which other rows can be decoded."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

__all__ = ["ChunkedPrefill", "finish"]

Result = TypeVar("Result")
#: A prefill in progress: yields the number of tokens of each forward pass before it runs.
ChunkedPrefill: TypeAlias = Generator[int, None, Result]


def finish(prefill: ChunkedPrefill[Result]) -> Result:
    """Run all forward passes of a prefill, and return its result."""
    while True:
        try:
            next(prefill)
        except StopIteration as end:
            result: Result = end.value
            return result
