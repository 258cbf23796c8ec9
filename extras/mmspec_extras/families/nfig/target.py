"""NFIG (2503.07076) as a target: each forward pass decides a frequency band."""

from __future__ import annotations

from typing import ClassVar

from mmspec.families.var.target import VARTarget
from mmspec.open_types import Keywords

__all__ = ["NFIGTarget"]


class NFIGTarget(VARTarget):
    """Adapter from a model that decides a frequency band in each forward pass (NFIG, 2503.07076)."""

    settings: ClassVar[Keywords] = {"guidance_scale": 5.5, "top_k": 990}
