"""Contact sheets: images with captions."""

from __future__ import annotations

import textwrap
from collections.abc import Sequence
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mmspec.errors import InputError
from mmspec.scenes.language import caption
from mmspec.scenes.render import render
from mmspec.scenes.world import CANVAS, sample_scene

__all__ = ["draw_contact_sheet", "image_sheet"]

COLUMNS_ON_SHEET = 6
ZOOM = 2
MARGIN = 10
LINES = 5
LINE_HEIGHT = 13
PIXELS_PER_CHARACTER = 6


def draw_contact_sheet(path: str | Path, seed: int = 0, count: int = 24) -> Path:
    """Draw `count` scenes with their captions to an image file; return its path."""
    if not 1 <= count <= 600:
        raise InputError("count", count, "must be from 1 to 600")
    path = Path(path)
    scenes = [sample_scene(seed + index) for index in range(count)]
    images = [Image.fromarray(render(scene)) for scene in scenes]
    sheet = image_sheet(images, [caption(scene) for scene in scenes])
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return path


def image_sheet(
    images: Sequence[Image.Image],
    captions: Sequence[str],
    columns: int = COLUMNS_ON_SHEET,
    side: int = CANVAS * ZOOM,
) -> Image.Image:
    """Draw a sheet of images with a caption below each.

    Args:
        images: at least one; small ones are enlarged by whole factors, up to `side`.
        captions: one for each; line breaks are kept, long lines wrapped, and surplus lines dropped.
        columns: largest number of images in a row.
        side: side of each image's square in pixels.
    """
    width, height = side + MARGIN, side + LINES * LINE_HEIGHT + MARGIN
    columns = min(columns, len(images))
    rows = -(-len(images) // columns)
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for index, (image, words) in enumerate(zip(images, captions, strict=True)):
        left, top = MARGIN + index % columns * width, MARGIN + index // columns * height
        sheet.paste(_fitted(image, side), (left, top))
        wrapped = [
            part for line in words.splitlines() for part in textwrap.wrap(line, side // PIXELS_PER_CHARACTER)
        ]
        text = "\n".join(wrapped[:LINES])
        pen.multiline_text((left, top + side + 2), text, fill="black", font=font, spacing=1)
    return sheet


def _fitted(image: Image.Image, side: int) -> Image.Image:
    """Enlarge the image by a whole factor, without interpolation, or shrink it to fit into the square."""
    larger = max(image.size)
    if larger > side:
        size = tuple(max(1, round(length * side / larger)) for length in image.size)
        return image.resize((size[0], size[1]), Image.Resampling.LANCZOS)
    zoom = side // larger
    return image.resize((image.width * zoom, image.height * zoom), Image.Resampling.NEAREST)
