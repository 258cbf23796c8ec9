"""Blocks of a clip that see the first block and the most recent ones (BlockVid, 2511.22973)."""

from __future__ import annotations

from mmspec.accelerators.accelerator import Accelerator, pair
from mmspec.families.parallel_images.cells import RecentBlocksDrafter

__all__ = ["sparse_context"]


def sparse_context(context_blocks: int = 16) -> Accelerator:
    """Blocks of a clip that see the first block and the most recent ones (BlockVid, 2511.22973)."""
    return pair("sparse_context", RecentBlocksDrafter(context_blocks))
