"""Plain decoding through the same loop, the baseline of every benchmark."""

from __future__ import annotations

from mmspec.accelerator import Accelerator, pair
from mmspec.core.plain import NoDrafter

__all__ = ["none"]


def none() -> Accelerator:
    """Plain decoding through the same loop."""
    return pair("none", NoDrafter())
