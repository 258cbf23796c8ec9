"""Published sizes of LPD's groups of cells, by the number of forward passes."""

from __future__ import annotations

__all__ = ["published_sizes"]

# From github.com/mit-han-lab/lpd, orders/group_sizes_lookup.json, by cells and forward passes: the number of
# groups of 1 cell, of 2 cells, and so on. Groups never shrink. Lists that `group_sizes` computes are omitted.
GROUPS_OF_SIZE = {
    (256, 128): (41, 46, 41),
    (256, 32): (2, 2, 2, 1, 2, 2, 2, 2, 2, 3, 4, 8),
    (256, 24): (1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 2, 1, 1, 3, 2, 3, 2),
    (1024, 512): (162, 188, 162),
    (1024, 256): (39, 28, 31, 34, 44, 80),
    (1024, 224): (32, 21, 21, 24, 27, 37, 62),
    (1024, 192): (22, 15, 16, 16, 19, 21, 27, 55, 0, 1),
    (1024, 160): (15, 11, 10, 12, 12, 13, 14, 17, 23, 33),
    (1024, 96): (5, 4, 4, 4, 3, 4, 4, 5, 4, 4, 6, 5, 6, 7, 8, 13, 10),
    (1024, 80): (4, 2, 3, 2, 3, 3, 2, 3, 3, 3, 3, 3, 3, 4, 4, 4, 6, 6, 7, 12),
    (1024, 64): (2, 2, 2, 1, 2, 2, 1, 2, 2, 2, 1, 2, 2, 2, 2, 2, 2, 3, 2, 3, 3, 3, 5, 6, 8),
    (1024, 56): (2, 1, 1, 2, 1, 1, 1, 2, 1, 1, 2, 1, 1, 2, 1, 2, 1, 2, 2, 1, 2, 2, 2, 2, 3, 3, 5, 6, 3),
}
# For few forward passes, group by group.
SIZES = {
    (256, 16): (1, 4, 6, 8, 11, 13, 15, 17, 19, 20, 22, 23, 24, 24, 24, 25),
    (256, 8): (1, 15, 24, 32, 40, 45, 49, 50),
    (1024, 40): (
        *(1, 2, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 20, 22, 23, 24, 26, 27, 28),
        *(29, 30, 31, 32, 33, 34, 35, 35, 36, 37, 37, 38, 38, 39, 39, 39, 40, 40, 40, 40),
    ),
}


def published_sizes(cells: int, steps: int) -> list[int] | None:
    """LPD's published number of cells for each forward pass; None if `group_sizes` computes it."""
    if (cells, steps) in SIZES:
        return list(SIZES[cells, steps])
    counts = GROUPS_OF_SIZE.get((cells, steps))
    if counts is None:
        return None
    return [size for size, count in enumerate(counts, 1) for _ in range(count)]
