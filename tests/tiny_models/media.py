"""Deterministic pictures and clips, drawn with numpy alone."""

from __future__ import annotations

import numpy as np
from PIL import Image

__all__ = ["tiny_clip", "tiny_picture", "tiny_pictures"]

SIZES = [(32, 32), (48, 32), (28, 40), (64, 48)]  # width, height


def tiny_picture(index: int = 0, size: tuple[int, int] | None = None) -> Image.Image:
    """One RGB picture: smooth colour waves whose phase depends on the index, so no two are alike."""
    width, height = size or SIZES[index % len(SIZES)]
    y, x = np.mgrid[0:height, 0:width] / 16.0
    phase = 1.7 * index
    waves = [np.sin(x * (1 + index % 3) + phase), np.cos(y + 2 * phase), np.sin(x + y - phase)]
    return Image.fromarray((127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8))


def tiny_pictures(count: int = 4) -> list[Image.Image]:
    """Several pictures of different sizes (widths and heights from 28 to 64)."""
    return [tiny_picture(index) for index in range(count)]


def tiny_clip(index: int = 0, frames: int = 4, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    """A clip of RGB frames, uint8 [frames, height, width, 3]: a picture that drifts to the right."""
    picture = np.asarray(tiny_picture(index, size))
    return np.stack([np.roll(picture, 4 * frame, axis=1) for frame in range(frames)])
