"""Canvases of noise (DiffusionGemma) with options of the caller."""

from __future__ import annotations

from mmspec.accelerator import Accelerator
from mmspec.families.diffusion_gemma.canvas import NoiseCanvasDrafter
from mmspec.families.diffusion_gemma.renoise import Renoise

__all__ = ["renoise"]


def renoise(
    entropy_bound: float | None = None,
    denoising_steps: int | None = None,
    t_min: float | None = None,
    t_max: float | None = None,
    stability_threshold: int | None = None,
    confidence_threshold: float | None = None,
) -> Accelerator:
    """Denoise canvases with these options instead of the checkpoint's. Options: see `Renoise`."""
    heat = t_min, t_max, stability_threshold, confidence_threshold
    rule = Renoise(entropy_bound, denoising_steps, *heat)
    return Accelerator("renoise", NoiseCanvasDrafter(rule), rule)
