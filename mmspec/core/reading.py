"""Prompts that are prefilled in several forward passes, between which other rows can be decoded."""

from __future__ import annotations

from collections.abc import Generator
from typing import TypeAlias, TypeVar

__all__ = ["Reading", "finish"]

Read = TypeVar("Read")
#: A prefill in progress: yields the number of tokens of each forward pass before it runs.
Reading: TypeAlias = Generator[int, None, Read]


def finish(reading: Reading[Read]) -> Read:
    """Run all forward passes of a prefill, and return its result."""
    while True:
        try:
            next(reading)
        except StopIteration as end:
            read: Read = end.value
            return read
