"""Decoding of a masked language model in the order of confidence (LLaDA, 2502.09992)."""

from __future__ import annotations

from mmspec.accelerator import Accelerator
from mmspec.families.masked_language.unmasking import UnmaskingDrafter
from mmspec.places.confidence import LowConfidence

__all__ = ["low_confidence"]


def low_confidence(
    places_per_step: int = 1,
    block_length: int | None = None,
    cache: str = "none",
    remask_below: float = 0.0,
    denoising_steps: int | None = None,
    end_cut: bool = False,
) -> Accelerator:
    """Decide places of a masked language model in the order of their confidence (LLaDA, 2502.09992).

    Args:
        places_per_step: see `LowConfidence`. One place over the whole output, or in the model's own blocks,
            is plain decoding.
        remask_below, denoising_steps, end_cut: see `LowConfidence`.
        block_length, cache: see `UnmaskingDrafter`.
    """
    rule = LowConfidence(places_per_step, remask_below, end_cut, denoising_steps=denoising_steps)
    return Accelerator("low_confidence", UnmaskingDrafter(block_length, cache), rule)
