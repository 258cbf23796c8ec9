"""Settings that the authors of parallel image models decode their checkpoints with: numbers, as data.

A checkpoint is known by its shape. Whatever a caller, an accelerator's option or a folder says comes first.
"""

from __future__ import annotations

from typing import NamedTuple

from mmspec.families.parallel_images.configuration import LPDConfig, PARConfig

__all__ = ["LPDSettings", "lpd_settings", "par_guidance", "published_sizes"]


class LPDSettings(NamedTuple):
    """Guidance scale, which rises with the image, and repulsion threshold of a checkpoint of LPD."""

    guidance_scale: float
    repulsion_threshold: int


# Of github.com/mit-han-lab/lpd, by layers, width and cells: --cfg and --lpd_order_file of
# scripts/eval/lpd_{l,xl,xxl}_res{256,512}_steps{20,48}.sh; orders/run_lpd_order.sh makes the orders of that
# name. Layers and widths are those of models/lpd.py.
LPD = {
    (24, 1024, 256): LPDSettings(4.8, 2),  # L
    (36, 1280, 256): LPDSettings(4.9, 2),  # XL
    (48, 1536, 256): LPDSettings(5.9, 3),  # XXL
    (24, 1024, 1024): LPDSettings(7.3, 4),
    (36, 1280, 1024): LPDSettings(6.0, 4),
}
OTHER_LPD = LPDSettings(4.8, 2)

# Guidance scales of github.com/YuqingWang1029/PAR, README.md, by layers, width and regions; sizes as in
# autoregressive/models/gpt.py.
PAR = {
    (36, 1280, 4): 1.5,  # PAR-XL-4x
    (48, 1536, 4): 1.435,  # PAR-XXL-4x
    (24, 3200, 4): 1.345,  # PAR-3B-4x
    (24, 3200, 16): 1.5,  # PAR-3B-16x
}
OTHER_PAR = 1.5

# Of github.com/mit-han-lab/lpd, orders/group_sizes_lookup.json, by cells and forwards: how many groups have
# 1 cell, how many have 2, and so on. Groups never shrink. Lists that `group_sizes` computes are left out.
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
# Of few forwards, group by group.
SIZES = {
    (256, 16): (1, 4, 6, 8, 11, 13, 15, 17, 19, 20, 22, 23, 24, 24, 24, 25),
    (256, 8): (1, 15, 24, 32, 40, 45, 49, 50),
    (1024, 40): (
        *(1, 2, 4, 6, 7, 9, 10, 12, 13, 15, 16, 18, 19, 20, 22, 23, 24, 26, 27, 28),
        *(29, 30, 31, 32, 33, 34, 35, 35, 36, 37, 37, 38, 38, 39, 39, 39, 40, 40, 40, 40),
    ),
}


def lpd_settings(config: LPDConfig) -> LPDSettings:
    """The settings of the published checkpoint of this shape; those of LPD-L at 256 for all other models."""
    shape = config.num_hidden_layers, config.hidden_size, config.grid_size**2
    return LPD.get(shape, OTHER_LPD) if config.body == "vit" else OTHER_LPD


def par_guidance(config: PARConfig) -> float:
    """The guidance scale of the published PAR of this shape; 1.5 for all other models."""
    return PAR.get((config.num_hidden_layers, config.hidden_size, config.group_size), OTHER_PAR)


def published_sizes(cells: int, steps: int) -> list[int] | None:
    """LPD's own number of cells for each of so many forwards, where it is none that a rule computes."""
    if (cells, steps) in SIZES:
        return list(SIZES[cells, steps])
    counts = GROUPS_OF_SIZE.get((cells, steps))
    if counts is None:
        return None
    return [size for size, count in enumerate(counts, 1) for _ in range(count)]
