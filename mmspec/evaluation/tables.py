"""Tables of figures, and the drawing of a caption whose tokens tell their origin."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.console import RenderableType
from rich.table import Table

from mmspec.errors import MissingDependencyError

__all__ = ["check_plot", "draw_decoding", "figures", "with_interval"]


def figures(
    columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, words: int = 1, **settings: Any
) -> Table:
    """A table whose first so many columns hold words, the others figures; settings are of rich's Table."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", **settings)
    for index, column in enumerate(columns):
        if index < words:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


def with_interval(value: float, ends: tuple[float, float] | None, unit: str = "") -> str:
    """A figure with its interval, if it has one."""
    return f"{value:.2f}{unit}" + ("" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]")


WIDTH = 900
IMAGE = 288
MARGIN = 24
LINE_HEIGHT = 26
DRAFTED, OWN = "#1a7f37", "#d1242f"


def check_plot(path: str | Path) -> Path:
    """Check that plots can be drawn; return the path of one.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(f"drawing {path} needs matplotlib: pip install 'mmspec[eval]'")
    return Path(path)


def draw_decoding(
    path: str | Path, image: Image.Image, pieces: Sequence[str], drafted: Sequence[bool], remark: str
) -> Path:
    """Draw an image beside its caption, every token coloured by its origin.

    Args:
        path: file to write.
        image: what was described.
        pieces: the text of each token, joining to the whole.
        drafted: for each token, True if it came from the draft.
        remark: a line under the text.
    """
    font = ImageFont.load_default(size=18)
    left = MARGIN * 2 + IMAGE
    placed, x, y = [], left, MARGIN
    for piece, is_drafted in zip(pieces, drafted, strict=True):
        width = int(font.getlength(piece))
        if x + width > WIDTH - MARGIN and piece.startswith(" "):  # never before a comma
            piece, x, y = piece.lstrip(), left, y + LINE_HEIGHT
            width = int(font.getlength(piece))
        placed.append((x, y, piece, DRAFTED if is_drafted else OWN))
        x += width
    text_bottom = y + 2 * LINE_HEIGHT
    sheet = Image.new("RGB", (WIDTH, max(text_bottom + 3 * LINE_HEIGHT, IMAGE + 2 * MARGIN)), "white")
    sheet.paste(image.resize((IMAGE, IMAGE), Image.Resampling.NEAREST), (MARGIN, MARGIN))
    pen = ImageDraw.Draw(sheet)
    for x, y, piece, colour in placed:
        pen.text((x, y), piece, fill=colour, font=font)
    pen.text((left, text_bottom), "from the draft", fill=DRAFTED, font=font)
    pen.text((left + 150, text_bottom), "the target's own, one per forward", fill=OWN, font=font)
    pen.text((left, text_bottom + LINE_HEIGHT), remark, fill="black", font=font)
    path = Path(path)
    sheet.save(path)
    return path
