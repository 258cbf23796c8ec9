"""Static draft tree from measured accuracies of heads (Medusa, 2401.10774, section 3.3)."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

__all__ = ["best_first"]


def best_first(rates: Sequence[Sequence[float]], nodes: int) -> list[int]:
    """Build the tree of largest expected acceptance length (Medusa, 2401.10774, section 3.3).

    A node's worth is the product of the rates along its path, as if heads were right independently of each
    other; the nodes of most worth are taken one after another, parents and elder siblings first.

    Args:
        rates: by head and rank, the share of places whose token the head predicted at that rank.
        nodes: of the tree, the root not counted; it has fewer where no more can be made.

    Returns:
        The parents of its nodes, the root (0) first, as `StaticTree` takes them.
    """
    parents = [0]
    # worth of a candidate and of its parent, in order; its level and rank; its parent
    waiting = [(-rates[0][0], -1.0, 0, 0, 0)] if rates and rates[0] else []
    while waiting and len(parents) <= nodes:
        worth, above, level, rank, parent = heapq.heappop(waiting)
        node = len(parents)
        parents.append(parent)
        if rank + 1 < len(rates[level]):
            heapq.heappush(waiting, (above * rates[level][rank + 1], above, level, rank + 1, parent))
        if level + 1 < len(rates) and rates[level + 1]:
            heapq.heappush(waiting, (worth * rates[level + 1][0], worth, level + 1, 0, node))
    return parents
