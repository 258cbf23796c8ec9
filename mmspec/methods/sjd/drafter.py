"""Speculative Jacobi decoding (2410.01699): the target fills a window of places and redraws them."""

from __future__ import annotations

from typing import Unpack

from mmspec.accelerator import Accelerator, pair
from mmspec.trees.jacobi import JacobiDrafter, WindowOptions

__all__ = ["sjd"]


def sjd(**window: Unpack[WindowOptions]) -> Accelerator:
    """Speculative Jacobi decoding (2410.01699), exact; options: see `JacobiDrafter`."""
    return pair("sjd", JacobiDrafter(**window))
