"""Drafter of EAGLE: a one-layer head on the target's hidden states grows a tree of candidates.

EAGLE-1 (Li et al., 2401.15077) with static trees, EAGLE-2 (2406.16858) with dynamic ones, LANTERN
(2410.03355) for images. EAGLE-1 draws the candidates of its tree without replacement when it samples
(`sampling="without_replacement"`). By default mmspec takes the likeliest ones, for which `sample_and_match`
is exact.
"""

from __future__ import annotations

from mmspec.heads.feature_session import GrownTreeDrafter

__all__ = ["EagleDrafter"]


class EagleDrafter(GrownTreeDrafter):
    """Drafts a tree with a head that predicts the target's hidden states.

    Args: see `HeadDrafter`.
    """

    title = "an EAGLE head"
