"""Several cells of an image in a forward pass, in any order (MAR, 2406.11838)."""

from __future__ import annotations

from mmspec.accelerators.accelerator import Accelerator, pair
from mmspec.families.mar import FeatureCaching
from mmspec.families.mar.cells import CellOrderDrafter

__all__ = ["masked"]


def masked(
    iterations: int | None = None,
    order: str = "random",
    last_steps: int | None = None,
    annealing: str = "linear",
    refresh: int | None = None,
    share: float = 0.1,
    test_layer: int = 3,
) -> Accelerator:
    """Several cells of an image in a forward, in any order (MAR, 2406.11838).

    The published order in 64 forwards is the model's plain decoding, in which cells of one forward are
    independent of each other; all else is approximate to it.

    Args:
        iterations, order, last_steps, annealing: as of `CellOrderDrafter`.
        refresh: forwards from one that computes all tokens to the next, where features are cached (LazyMAR,
            2503.12450); None computes all in every forward.
        share, test_layer: as of `FeatureCaching`.
    """
    caching = None if refresh is None else FeatureCaching(refresh, share=share, test_layer=test_layer)
    return pair("masked", CellOrderDrafter(iterations, order, last_steps, annealing, caching))
