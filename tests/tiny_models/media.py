"""Deterministic images and clips, drawn with numpy alone."""

from __future__ import annotations

import numpy as np
from PIL import Image

SIZES = [(32, 32), (48, 32), (28, 40), (64, 48)]  # width, height


def tiny_image(index: int = 0, size: tuple[int, int] | None = None) -> Image.Image:
    """One RGB image: smooth colour waves whose phase depends on the index, so no two are alike."""
    width, height = size or SIZES[index % len(SIZES)]
    y, x = np.mgrid[0:height, 0:width] / 16.0
    phase = 1.7 * index
    waves = [np.sin(x * (1 + index % 3) + phase), np.cos(y + 2 * phase), np.sin(x + y - phase)]
    return Image.fromarray((127.5 + 127.5 * np.stack(waves, -1)).astype(np.uint8))


def tiny_images(count: int = 4) -> list[Image.Image]:
    """Several images of different sizes (widths and heights from 28 to 64)."""
    return [tiny_image(index) for index in range(count)]


def tiny_clip(index: int = 0, frames: int = 4, size: tuple[int, int] = (32, 32)) -> np.ndarray:
    """A clip of RGB frames, uint8 [frames, height, width, 3]: an image that drifts to the right."""
    image = np.asarray(tiny_image(index, size))
    return np.stack([np.roll(image, 4 * frame, axis=1) for frame in range(frames)])
