"""NFIG (2503.07076) as a target: a band of frequencies in each forward pass."""

from __future__ import annotations

from typing import ClassVar

from mmspec.families.var.target import VARTarget
from mmspec.open_types import Keywords

__all__ = ["NFIGTarget"]


class NFIGTarget(VARTarget):
    """Adapter from a model that decides a band of frequencies in each forward pass (NFIG, 2503.07076)."""

    settings: ClassVar[Keywords] = {"guidance_scale": 5.5, "top_k": 990}
