"""Heat map of an image's cells: how many were committed by the forward that committed each."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image

from mmspec.decoding.image_grid import FREE, ImageGrid
from mmspec.media.data_url import data_url

__all__ = ["CommitMap", "heat_image", "heat_map"]

OPEN = -1
#: Dark to bright, evenly spaced and told apart by the colour-blind; one cell per forward to the most.
COLOURS = np.array([(49, 46, 129), (37, 99, 165), (16, 152, 151), (92, 200, 99), (250, 204, 21)], float)


class CommitMap:
    """Record of which forward committed each cell of an image.

    Args:
        grid: layout of the image.
    """

    def __init__(self, grid: ImageGrid) -> None:
        self._grid = grid
        self._forward = np.full(grid.length, OPEN)
        self._forwards = 0

    def add(self, decided: Sequence[bool] | np.ndarray) -> None:
        """Record a forward.

        Args:
            decided: for each output index, whether its token is decided by now; missing ones are not.
        """
        known = np.zeros(self._grid.length, bool)
        known[: len(decided)] = np.asarray(decided, bool)[: self._grid.length]
        self._forward[known & (self._forward == OPEN)] = self._forwards
        self._forwards += 1

    @property
    def counts(self) -> np.ndarray:
        """[rows, columns] cells that the forward of each cell committed; 0 where a cell is open."""
        cells = self._forward[np.array(self._grid.forced) == FREE]
        committed = np.bincount(cells[cells != OPEN], minlength=1)
        counts = np.where(cells == OPEN, 0, committed[cells])
        return counts.reshape(self._grid.rows, self._grid.columns)


def heat_image(counts: np.ndarray, most: int) -> Image.Image:
    """Draw counts [rows, columns], a pixel each; those of 0 are transparent.

    Args:
        counts: as of a `CommitMap`.
        most: the count that gets the brightest colour.
    """
    place = np.clip((counts - 1) / max(most - 1, 1), 0, 1) * (len(COLOURS) - 1)
    colours = np.stack([np.interp(place, range(len(COLOURS)), COLOURS[:, k]) for k in range(3)], -1)
    opaque = np.where(counts > 0, 255, 0)[..., None]
    return Image.fromarray(np.concatenate([colours.round(), opaque], -1).astype(np.uint8))


def heat_map(counts: np.ndarray, most: int | None = None) -> str:
    """Show counts [rows, columns] as HTML, with their scale.

    Args:
        counts: as of a `CommitMap`.
        most: the end of the scale; None is the largest count.
    """
    largest, (rows, columns) = int(counts.max(initial=0)), counts.shape
    most = max(largest if most is None else most, 1)
    said = f"{rows} by {columns} cells; up to {largest} of them were committed by one forward"
    return (
        f'<figure class="mm-heat"><img alt="{said}" src="{data_url(heat_image(counts, most))}" '
        f'style="aspect-ratio: {columns} / {rows}"><figcaption><span>1</span><i></i><span>{most}</span>'
        "</figcaption></figure>"
    )
