"""Multi-token prediction: the layer that the target was trained with grows a tree of candidates."""

from __future__ import annotations

from mmspec.heads.feature_session import GrownTreeDrafter

__all__ = ["MtpDrafter"]


class MtpDrafter(GrownTreeDrafter):
    """As EAGLE, by the layer that the target was trained with for multi-token prediction (2412.19437).

    Args: as of `HeadDrafter`.
    """

    title = "an MTP head"
