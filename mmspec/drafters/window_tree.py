"""Shape of a window whose first places have several candidates, each with places behind it."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product
from math import prod

from mmspec.errors import InputError
from mmspec.validation import is_integer

__all__ = ["WindowTree", "read_front"]

MAX_CHAINS = 64


def read_front(front: str | Sequence[int]) -> tuple[int, ...]:
    """Read the candidates of the first places: (4, 2) or "4x2"; nothing where each place has one.

    Raises:
        InputError: no such numbers, or more than `MAX_CHAINS` chains.
    """
    try:
        sizes = tuple(map(int, front.split("x") if isinstance(front, str) and front else front))
    except (TypeError, ValueError):
        sizes = (0,)
    if any(size < 1 for size in sizes) or prod(sizes) > MAX_CHAINS:
        raise InputError("front", front, f"numbers of candidates as 4x2, of at most {MAX_CHAINS} chains")
    return sizes if prod(sizes) > 1 else ()


class WindowTree:
    """Tree of the nodes of a window: those of a slot stand side by side, those of one parent together.

    A chain is a path from the root to the end of the window. Up to `reach` every chain has nodes of its own;
    behind it all share those of the first chain, which are not behind the others in the tree.

    Args:
        window: slots, the root's included.
        front: candidates at each of the first slots behind the root's, behind each candidate before.
        reach: last slot with nodes of every chain; None for the last of the window.

    Attributes:
        parents: of each node, 0 for the root itself.
        slots: of each node.
        nodes: of each chain, one for each slot.
        chain: the first chain through each node.
        choices: of each chain, which candidate it goes through at each place of the front.

    Raises:
        InputError: the front is longer than the window, or the reach is not between their ends.
    """

    def __init__(self, window: int, front: tuple[int, ...], reach: int | None = None) -> None:
        if len(front) >= window:
            raise InputError("front", front, f"at most {window - 1} places, those of the window")
        if reach is not None and (not is_integer(reach) or not len(front) <= reach < window):
            raise InputError("reach", reach, f"{len(front)} to {window - 1}, behind the front")
        self.front, self.reach = front, window - 1 if reach is None else reach
        count = prod(front)
        self.parents, self.slots, self.chain, levels = [0], [0], [0], [[0]]
        for slot in range(1, window):
            start, before = len(self.parents), levels[-1]
            branch, forked = self.branch(slot), before[: self.chains(slot)]
            self.parents += [parent for parent in forked for _ in range(branch)]
            level = list(range(start, len(self.parents)))
            self.slots += [slot] * len(level)
            self.chain += [count // len(level) * node for node in range(len(level))]
            levels.append(level)
        self.nodes = [[level[chain * len(level) // count] for level in levels] for chain in range(count)]
        self.choices = [list(choice) for choice in product(*map(range, front))]

    def branch(self, slot: int) -> int:
        """Candidates at a slot behind each parent."""
        return self.front[slot - 1] if slot <= len(self.front) else 1

    def chains(self, slot: int) -> int:
        """Parents of the nodes of a slot."""
        return prod(self.front[: slot - 1]) if slot <= self.reach else 1
