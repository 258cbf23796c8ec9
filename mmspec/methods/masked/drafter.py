"""Several cells of an image in a forward pass, in any order (MAR, 2406.11838)."""

from __future__ import annotations

from mmspec.accelerator import Accelerator, pair
from mmspec.families.mar.cells import CellOrderDrafter

__all__ = ["masked"]


def masked(
    iterations: int | None = None,
    order: str = "random",
    last_steps: int | None = None,
    annealing: str = "linear",
) -> Accelerator:
    """Decide several cells of an image in a forward pass, in any order (MAR, 2406.11838).

    The published order in 64 forward passes is the model's plain decoding, in which cells of one forward pass
    are independent of each other; all other settings are approximate.

    Args:
        iterations, order, last_steps, annealing: see `CellOrderDrafter`.
    """
    return pair("masked", CellOrderDrafter(iterations, order, last_steps, annealing))
