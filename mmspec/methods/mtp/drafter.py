"""Drafter of multi-token prediction: the target's MTP layer grows a tree of candidates."""

from __future__ import annotations

from mmspec.heads.feature_session import GrownTreeDrafter

__all__ = ["MtpDrafter"]


class MtpDrafter(GrownTreeDrafter):
    """Drafts a tree as EAGLE does, with the target's layer for multi-token prediction (2412.19437).

    Args: see `HeadDrafter`.
    """

    title = "an MTP head"
