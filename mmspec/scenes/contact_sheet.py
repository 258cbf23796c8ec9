"""A sheet of scenes with their captions, to look at."""

from __future__ import annotations

import textwrap
from pathlib import Path

from PIL import Image, ImageDraw, ImageFont

from mmspec.errors import InputError
from mmspec.scenes.language import caption
from mmspec.scenes.render import render
from mmspec.scenes.world import CANVAS, sample_scene

__all__ = ["draw_contact_sheet"]

COLUMNS_ON_SHEET = 6
ZOOM = 2
MARGIN = 10
LINES = 5
LINE_HEIGHT = 13
CHARACTERS = 32


def draw_contact_sheet(path: str | Path, seed: int = 0, count: int = 24) -> Path:
    """Draw `count` scenes with their captions to a picture file; returns its path."""
    if not 1 <= count <= 600:
        raise InputError("count", count, "1 to 600 scenes")
    path = Path(path)
    width, height = CANVAS * ZOOM + MARGIN, CANVAS * ZOOM + LINES * LINE_HEIGHT + MARGIN
    columns = min(COLUMNS_ON_SHEET, count)
    rows = -(-count // columns)
    sheet = Image.new("RGB", (columns * width + MARGIN, rows * height + MARGIN), "white")
    pen, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=11)
    for index in range(count):
        scene = sample_scene(seed + index)
        left, top = MARGIN + index % columns * width, MARGIN + index // columns * height
        picture = Image.fromarray(render(scene)).resize(
            (CANVAS * ZOOM, CANVAS * ZOOM), Image.Resampling.NEAREST
        )
        sheet.paste(picture, (left, top))
        text = "\n".join(textwrap.wrap(caption(scene), CHARACTERS)[:LINES])
        pen.multiline_text((left, top + CANVAS * ZOOM + 2), text, fill="black", font=font, spacing=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    sheet.save(path)
    return path
