"""Tables and plots of figures, for people; plots need matplotlib."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from rich import box
from rich.table import Table

from mmspec.errors import MissingDependencyError
from mmspec.evaluation.speed.record import Record
from mmspec.evaluation.speed.timing import BASELINE

__all__ = ["check_plot", "draw_bench", "draw_decoding", "figures"]


def figures(
    columns: Sequence[str], rows: Iterable[Sequence[str]], *, words: int = 1, **settings: Any
) -> Table:
    """A table of figures.

    Args:
        columns: their headers.
        rows: the cells.
        words: how many of the first columns hold words, which begin at the left.
        settings: of rich's Table, such as its title.
    """
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", **settings)
    for index, column in enumerate(columns):
        if index < words:
            table.add_column(column, overflow="fold")
        else:
            table.add_column(column, justify="right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table


WIDTH = 900
IMAGE = 288
MARGIN = 24
LINE_HEIGHT = 26
DRAFTED, OWN = "#1a7f37", "#d1242f"
PROMISES = {"exact": DRAFTED, "tv": "#bf8700", "approximate": "#bf8700", "lossy": OWN}


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


def draw_bench(path: str | Path, records: Sequence[Record], by_category: Sequence[Record] = ()) -> Path:
    """Plot a bench: of images that were read, forwards saved and kernel distances; else speed-ups.

    Args:
        path: file to write.
        records: of all prompts.
        by_category: of the prompts of each category, which get a panel each.

    Raises:
        MissingDependencyError: matplotlib is not installed.
    """
    path = check_plot(path)
    draw = _draw_images if all(one.quality for one in records) else _draw_speedups
    draw(path, by_category or records)
    return path


def _draw_speedups(path: Path, records: Sequence[Record]) -> None:
    """A panel for each category, a bar for each accelerator.

    Bars are the speed-up of decoding, dots the one end to end; the words say the acceptance length, bonus
    included, and how many outputs are those of plain decoding where not all are.
    """
    from matplotlib.figure import Figure

    categories = list(dict.fromkeys(one.category for one in records))
    names = list(dict.fromkeys(one.accelerator for one in records))
    figure = Figure(figsize=(2.6 * len(categories) + 2.4, 0.36 * len(names) + 1.3), layout="constrained")
    panels = figure.subplots(1, len(categories), sharey=True, squeeze=False)[0]
    places, longest = range(len(names)), max(one.decode_speedup for one in records)
    for panel, category in zip(panels, categories, strict=True):
        shown = [one for one in records if one.category == category]
        decoding = [one.decode_speedup for one in shown]
        bars = panel.barh(places, decoding, color=["#1a7f37" if one >= 1 else "#bf8700" for one in decoding])
        panel.plot([one.speedup for one in shown], places, "o", color="#0d1117", markersize=4)
        panel.bar_label(bars, [f" {_words(one)}" for one in shown], fontsize=7)
        panel.axvline(1.0, color="#656d76", linewidth=0.8)
        panel.set_xlim(0, 1.5 * longest)
        panel.set_title(category.replace("_", " "), fontsize=10)
        panel.set_xlabel("times plain decoding", fontsize=8)
    panels[0].set_yticks(places, names, fontsize=8)
    panels[0].invert_yaxis()
    figure.suptitle("bars: decoding alone; dots: end to end; numbers: tokens a target forward", fontsize=8)
    figure.savefig(path, dpi=130)


def _words(record: Record) -> str:
    same = "" if record.identical == 1.0 else f", {record.identical:.0%} identical"
    return f"{record.acceptance_length:.2f}{same}"


def _draw_images(path: Path, records: Sequence[Record]) -> None:
    """Forwards saved, with the promise in the colour; and kernel distances with their 95 % intervals.

    The line at 0 is no difference, the band the interval of plain decoding itself.
    """
    from matplotlib.figure import Figure

    colour = [PROMISES[one.exactness.split("<")[0]] for one in records]
    figure = Figure(figsize=(13, 0.36 * len(records) + 1.4), layout="constrained")
    saved, distance = figure.subplots(1, 2, sharey=True)
    rows = range(len(records))
    bars = saved.barh(rows, [one.step_compression for one in records], color=colour)
    saved.bar_label(bars, [f" {one.nfe_mean:.0f} NFE{_attributes(one)}" for one in records], fontsize=8)
    saved.set_xlim(0, 1.9 * max(one.step_compression for one in records))
    saved.set_yticks(rows, [f"{one.accelerator}  ({one.exactness})" for one in records], fontsize=8)
    saved.invert_yaxis()
    saved.margins(y=0.01)
    saved.set_xlabel("times fewer forwards of the target", fontsize=9)
    for row, record in enumerate(records):
        kid = (record.quality or {})["kid"]
        middle, low, high = kid["value"], kid["low"], kid["high"]
        ends = [[middle - low], [high - middle]]
        distance.errorbar(middle, row, xerr=ends, fmt="o", color=colour[row], capsize=3)
        if record.accelerator == BASELINE:
            distance.axvspan(low, high, color=colour[row], alpha=0.1)
    distance.axvline(0, color="0.6", linewidth=0.8)
    distance.set_xlabel("kernel distance to plain decoding (95 %)", fontsize=9)
    figure.savefig(path, dpi=90)


def _attributes(record: Record) -> str:
    found = (record.quality or {}).get("attributes")
    return "" if found is None else f", {found['value']:.0%} of attributes"
