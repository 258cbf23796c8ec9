"""Tokens averaged over the cells of a grid, whatever grid they came from."""

from __future__ import annotations

from mmspec.compressors.interface import VisualTokens
from mmspec.visual_tokens.boxes import overlap, raster

__all__ = ["pool"]


def pool(images: VisualTokens, rows: int, columns: int) -> VisualTokens:
    """The mean of the tokens in each cell of a grid, weighted by how much of the cell they cover.

    Equals `avg_pool2d` where the grids divide each other. A base view and its tiles weigh the same; tokens
    without a place are left out; cells that no token covers are padding.
    """
    cells = raster(rows, columns).to(images.boxes)
    weights = overlap(images.boxes, cells) * images.mask[:, None]
    covered = weights.sum(-1)
    mask = covered > 0
    shares = weights / covered.where(mask, 1.0)[..., None]
    mean = shares.to(images.features) @ images.features
    return VisualTokens(mean, mask, cells.expand(len(mean), -1, -1))
