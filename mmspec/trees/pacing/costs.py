"""Measured costs of rounds by draft size."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from statistics import median

from mmspec.trees.pacing.config import PacingConfig

PLAIN = 0  # the choice of a plain round


class RoundCosts:
    """Costs of rounds by choice, in plain rounds, from the latest times of each choice.

    Args:
        sizes: nodes or levels of each choice: 0 for the plain round, then the others, the largest first.
        config: constants of pacing.
        rows: number of rows of the rounds.

    Attributes:
        seconds: the latest measured times of each choice.
        node_share: estimated cost of one more node, in plain rounds of a single row.
    """

    def __init__(self, sizes: Sequence[int], config: PacingConfig, rows: int = 1) -> None:
        self.sizes, self.config, self.rows = sizes, config, rows
        self.node_share = config.node_cost
        self.seconds: list[deque[float]] = [deque(maxlen=config.measured_rounds) for _ in sizes]
        self._met = {PLAIN}

    @property
    def node_cost(self) -> float:
        """Estimated cost of one more candidate for each row, if times are linear in the nodes of all rows."""
        return self.rows * self.node_share / (1 + (self.rows - 1) * self.node_share)

    def continue_from(self, other: RoundCosts) -> None:
        """Estimate `node_share` from the costs that were measured at another number of rows."""
        self.node_share = other.node_share
        smallest, rows = len(other.sizes) - 1, other.rows
        if self.config.costs_scale and other.is_measured(smallest) and other.is_measured(PLAIN):
            cost = min(1.0, max(0.0, (other(smallest) - 1) / other.sizes[smallest]))
            # few nodes can be free where more of them are not
            self.node_share = max(self.config.node_cost, cost / (rows - cost * (rows - 1)))

    def record(self, choice: int, seconds: float) -> bool:
        """Record the time of a round, and return whether it counts.

        The first round of a size may compile code, capture a graph or pack layers. It counts only if it took
        at most `stall` times its estimated cost.
        """
        is_first = choice not in self._met
        self._met.add(choice)
        if is_first and self.plain(seconds) > self.config.stall * self(choice):
            return False
        self.seconds[choice].append(seconds)
        return True

    def is_measured(self, choice: int) -> bool:
        """Whether enough rounds of a choice were measured."""
        return len(self.seconds[choice]) >= self.config.trials

    def plain(self, seconds: float) -> float:
        """Convert seconds to plain rounds; 0 until a plain round was measured."""
        known = self.seconds[PLAIN]
        return seconds / median(known) if known else 0.0

    def smaller(self, choice: int) -> int:
        """Choice of the next smaller size; the plain round after the smallest."""
        return (choice + 1) % len(self.sizes)

    def __call__(self, choice: int) -> float:
        """Cost of a round of a choice, in plain rounds.

        The cost is the median of the latest times, or their minimum while there are few, because some may
        include preparation. Without times, it is the cost of the next smaller size plus `node_cost` per
        additional node.
        """
        times = self.seconds[choice]
        if times and self.seconds[PLAIN]:
            return self.plain(median(times) if 2 * len(times) >= self.config.measured_rounds else min(times))
        if choice == PLAIN:
            return 1.0
        smaller = self.smaller(choice)
        return self(smaller) + self.node_cost * (self.sizes[choice] - self.sizes[smaller])
