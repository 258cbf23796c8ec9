"""Tables of figures, and an image of a caption with its draft tokens in another color."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.console import RenderableType
from rich.table import Table

from mmspec.errors import MissingDependencyError, how_to_install

__all__ = ["MOST_COLUMNS", "check_plot", "draw_decoding", "figures", "with_interval"]

MOST_COLUMNS = 7  # of a table without --wide
LABEL = 28  # characters on a line of a name with options


def figures(
    columns: Sequence[str], rows: Iterable[Sequence[RenderableType]], *, words: int = 1, **settings: Any
) -> Table:
    """Make a table of figures.

    Args:
        columns: headers. A column of accelerators breaks names before options, never inside a word.
        rows: cells of each row.
        words: number of leading columns with text, which may be wrapped; the others have figures.
        settings: keywords of rich's `Table`.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", **settings)
    named = {index for index, column in enumerate(columns) if column == "accelerator"}
    for index, column in enumerate(columns):
        if index in named:
            table.add_column(column, overflow="ellipsis")
        elif index < words:
            table.add_column(column, overflow="ellipsis" if index == 0 else "fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        cells = enumerate(row)
        table.add_row(*(_broken(one) if i in named and isinstance(one, str) else one for i, one in cells))
    return table


def _broken(label: str) -> str:
    """An accelerator with line breaks before options, where a line would be too long."""
    name, *options = label.split(":")
    lines = [name]
    for option in options:
        if len(lines[-1]) + len(option) < LABEL:
            lines[-1] += f":{option}"
        else:
            lines.append(f" :{option}")
    return "\n".join(lines)


def with_interval(value: float, ends: tuple[float, float] | None, unit: str = "") -> str:
    """A figure with its interval, if any."""
    return f"{value:.2f}{unit}" + ("" if ends is None else f" [{ends[0]:.2f}, {ends[1]:.2f}]")


WIDTH = 900
IMAGE = 288
MARGIN = 24
LINE_HEIGHT = 26
DRAFTED, OWN = "#0072B2", "#D55E00"  # blue and vermilion of Okabe and Ito, distinct to colour-blind readers


def check_plot(path: str | Path) -> Path:
    """Return the path of a plot, after a check that matplotlib is installed.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    if importlib.util.find_spec("matplotlib") is None:
        raise MissingDependencyError(f"drawing {path} needs matplotlib: {how_to_install('eval')}")
    return Path(path)


def draw_decoding(
    path: str | Path, image: Image.Image, pieces: Sequence[str], drafted: Sequence[bool], remark: str
) -> Path:
    """Draw an image beside its caption; draft tokens and the target's own tokens have different colors.

    Args:
        path: file to write.
        image: the image that was described.
        pieces: the text of each token.
        drafted: for each token, True if it is an accepted draft token.
        remark: a line below the text.
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
    pen.text((left + 150, text_bottom), "chosen by the target, one per forward pass", fill=OWN, font=font)
    pen.text((left, text_bottom + LINE_HEIGHT), remark, fill="black", font=font)
    path = Path(path)
    sheet.save(path)
    return path
