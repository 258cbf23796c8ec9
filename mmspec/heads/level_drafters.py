"""Drafters with one head for each level of the tree (Medusa, Hydra)."""

from __future__ import annotations

from mmspec.heads.drafter import HeadDrafter

__all__ = ["LevelDrafter"]


class LevelDrafter(HeadDrafter):
    """A tree by one head for each of its levels, so that it is at most as deep as there are heads.

    Args: as of `HeadDrafter`; `tree` may be "measured" too, the best static one of its size by what the
        training measured.
    """

    @property
    def deepest(self) -> tuple[int, str]:
        return self.model.config.num_heads, "the number of heads"
