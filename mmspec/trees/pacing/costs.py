"""Measured costs of rounds by draft size."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque
from collections.abc import Sequence
from statistics import median

from mmspec.trees.pacing.config import PacingConfig

PLAIN = 0  # the choice of a plain round


class PassTimes:
    """Times of the target's forward passes by their number of tokens, at any number of rows.

    A pass over n nodes of each of B rows takes about as long as one over their B (n + 1) tokens in other
    rows. The time of a pass that was not measured therefore follows from those with fewer and with more
    tokens.

    Args:
        config: constants of pacing.

    Attributes:
        known: measured numbers of tokens, ascending.
        seconds: median of the latest times of each; a round asks for many.
    """

    def __init__(self, config: PacingConfig) -> None:
        self.config = config
        self.known: list[int] = []
        self.seconds: dict[int, float] = {}
        self._latest: dict[int, deque[float]] = {}

    def record(self, tokens: int, seconds: float) -> None:
        """Record the time of a pass over so many tokens."""
        if tokens not in self._latest:
            insort(self.known, tokens)
            self._latest[tokens] = deque(maxlen=self.config.measured_rounds)
        self._latest[tokens].append(seconds)
        self.seconds[tokens] = median(self._latest[tokens])

    def __call__(self, tokens: int) -> float:
        """Seconds of a pass over so many tokens; 0 if none was measured.

        Beyond the measured numbers, further tokens take as long as those between the measured ones, and at
        least as long as `node_cost` estimates: few tokens can be free where more of them are not.
        """
        known, seconds = self.known, self.seconds
        if not known:
            return 0.0
        after = bisect_left(known, tokens)
        if after == 0 or after == len(known):
            nearest = known[min(after, len(known) - 1)]
            return seconds[nearest] + (tokens - nearest) * self._token(nearest)
        low, high = known[after - 1], known[after]
        share = (tokens - low) / (high - low)
        return (1 - share) * seconds[low] + share * seconds[high]

    def _token(self, nearest: int) -> float:
        """Estimated seconds of a token more than the largest measured number, or less than the smallest."""
        least = self.config.node_cost * self.seconds[nearest] / (1 + self.config.node_cost * (nearest - 1))
        first, last = self.known[0], self.known[-1]
        if nearest == first:
            return least
        return max(least, (self.seconds[last] - self.seconds[first]) / (last - first))


class RoundCosts:
    """Costs of rounds by choice, in plain rounds, from the latest times of each choice.

    Args:
        sizes: nodes or levels of each choice: 0 for the plain round, then the others, the largest first.
        config: constants of pacing.
        rows: number of rows of the rounds.
        passes: times by number of tokens, if the times of rounds are those of the target's forward passes.

    Attributes:
        seconds: the latest measured times of each choice.
        node_share: estimated cost of one more node, in plain rounds of a single row; not used with `passes`.
    """

    def __init__(
        self, sizes: Sequence[int], config: PacingConfig, rows: int = 1, passes: PassTimes | None = None
    ) -> None:
        self.sizes, self.config, self.rows, self.passes = sizes, config, rows, passes
        self.node_share = config.node_cost
        self.seconds: list[deque[float]] = [deque(maxlen=config.measured_rounds) for _ in sizes]
        self._met = {PLAIN}

    @property
    def node_cost(self) -> float:
        """Estimated cost of one more candidate for each row, if times are linear in the nodes of all rows."""
        return self.rows * self.node_share / (1 + (self.rows - 1) * self.node_share)

    def continue_from(self, other: RoundCosts) -> None:
        """Estimate costs from those that were measured at another number of rows."""
        self.passes = other.passes  # both go on recording
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
        if self.passes is not None:
            self.passes.record(self._tokens(choice), seconds)
        return True

    def _tokens(self, choice: int) -> int:
        """Tokens of a forward pass of a choice, those of all rows."""
        return self.rows * (1 + self.sizes[choice])

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
        include preparation. Without times, it follows from `passes`, or is the cost of the next smaller size
        plus `node_cost` per additional node.
        """
        times = self.seconds[choice]
        if times and self.seconds[PLAIN]:
            return self.plain(median(times) if 2 * len(times) >= self.config.measured_rounds else min(times))
        if choice == PLAIN:
            return 1.0
        if self.passes is not None and (plain := self.passes(self.rows)):
            return self.passes(self._tokens(choice)) / plain
        smaller = self.smaller(choice)
        return self(smaller) + self.node_cost * (self.sizes[choice] - self.sizes[smaller])
