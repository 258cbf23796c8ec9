"""Policy that prunes a draft: it chooses how many candidates are kept."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean
from typing import Self

from mmspec.trees.pacing.candidates import Calibration
from mmspec.trees.pacing.config import DEFAULT_PACING, PacingConfig
from mmspec.trees.pacing.costs import PLAIN, PassTimes, RoundCosts
from mmspec.trees.pacing.pauses import Pauses


class PruningPolicy:
    """Keeps as many candidates of a draft as pay off, on this device and for this text.

    The expected tokens of a round are 1 plus the sum of the probabilities that the paths to its candidates
    are correct. Its cost grows with their number. The policy keeps the n most likely ones for which expected
    tokens minus `worth` times cost is largest. If drafting yields less than `least_speedup`, it pauses.

    A drafter with probes has candidates only after a round with probes. With such a drafter, only the rounds
    of a pause are plain, and the cost of every other round includes its probes.

    Args:
        nodes: largest number of candidates of each size, the largest first. Choice 0 is the plain round, and
            choices 1, 2, ... are these.
        probes: number of probe nodes in a draft of each size; none by default.
        config: constants of pacing.
        rows: number of rows of the rounds.
    """

    def __init__(
        self,
        nodes: Sequence[int],
        probes: Sequence[int] = (),
        config: PacingConfig = DEFAULT_PACING,
        rows: int = 1,
    ) -> None:
        self.nodes, self.config, self.rows = (0, *nodes), config, rows
        sizes = [size + read for size, read in zip(nodes, probes or [0] * len(nodes), strict=True)]
        self.cost = RoundCosts((0, *sizes), config, rows, PassTimes(config))
        self._pauses = Pauses(config)
        self._probes = any(probes)
        self.calibrate = Calibration(config)
        self._tokens = self._time = 1 / (1 - config.decay)  # decayed sums of tokens and costs
        self._since_plain = 0  # rounds
        self._level_cost = 0.0  # of drafting one level, without the target's forward pass
        self._given: dict[int, tuple[float, float]] = {}  # tokens and levels of recent drafts, by choice
        self._kept = deque([config.least_nodes], maxlen=config.measured_rounds)  # candidates of recent drafts

    def continue_from(self, other: Self) -> None:
        """Take over the calibration of another number of rows, and its pause if drafts cost more here."""
        self.calibrate = other.calibrate  # both go on counting
        self._level_cost, self._given = other._level_cost, dict(other._given)
        self._kept.extend(other._kept)
        self.cost.continue_from(other.cost)
        if self.rows > other.rows:
            self._pauses.continue_from(other._pauses)

    def rest_unless_promising(self) -> None:
        """Postpone the first trial unless one candidate, or a size used at other rows, may pay off."""
        smallest = len(self.nodes) - 1
        expected = {smallest: (1 + self.config.next_rate, 1.0), **self._given}
        if all(
            tokens < self.config.least_speedup * (self.cost(choice) + levels * self._level_cost)
            for choice, (tokens, levels) in expected.items()
        ):
            self._pauses.begin_longest()

    @property
    def worth(self) -> float:
        """Recent number of tokens in the time of a plain round; at least 1."""
        return max(1.0, self._tokens / self._time)

    @property
    def limit(self) -> int:
        """Largest useful number of candidates: twice the most that any recent draft kept."""
        return 2 * max(self._kept)

    def least(self, depth: int) -> list[float]:
        """Path probabilities below which a further level does not pay off, for levels 1 to depth - 1.

        If the most likely path to a level has probability P, another level yields P * `next_rate` tokens. It
        costs the drafter's time for a level and the target's time for one more candidate; the cost per
        candidate can be lower for several further candidates than for one.
        """
        costs = [self._cost_of(nodes) for nodes in range(1, depth + 1)]
        found = []
        for level in range(depth - 1):
            more = min((costs[deep] - costs[level]) / (deep - level) for deep in range(level + 1, depth))
            found.append(min(1.0, self.worth * (self._level_cost + more) / self.config.next_rate))
        return found

    def _cost_of(self, nodes: int) -> float:
        """Cost of a round with 1 or more candidates, interpolated between the sizes."""
        large = [size for size in range(1, len(self.nodes)) if self.nodes[size] >= nodes]
        after = max(large, default=1)
        before = self.cost.smaller(after)
        low, high = self.nodes[before], self.nodes[after]
        share = min(1.0, (nodes - low) / (high - low))
        return (1 - share) * self.cost(before) + share * self.cost(after)

    def rests(self) -> bool:
        """Return whether the next round is plain. Call it once per round: it counts the rounds of pauses."""
        if self._pauses.goes_on() or not self.cost.is_measured(PLAIN):
            return True
        if self._since_plain >= self.config.remeasure_rounds:
            self._since_plain = 0
            return True
        return self._pauses.begins(pays=self._tokens / self._time >= self.config.least_speedup)

    def choose(self, sums: Sequence[Sequence[float]]) -> int:
        """Choose how many candidates are kept: 0 for none, or an index into `nodes`.

        Args:
            sums: of each unfinished row, the expected tokens of its 0, 1, 2, ... most likely candidates.
        """
        worth, best = self.worth, PLAIN
        most = -math.inf if self._probes else 1.0 - worth
        for size in range(len(self.nodes) - 1, 0, -1):
            expected = fmean(row[min(self.nodes[size], len(row) - 1)] for row in sums)
            gain = expected - worth * self.cost(size)
            if gain > most:
                best, most = size, gain
        return best

    def record(
        self, choice: int, tokens: Sequence[int], seconds: float, drafting: float, levels: int
    ) -> None:
        """Record a round.

        Args:
            choice: its size.
            tokens: of each unfinished row.
            seconds: of the whole round.
            drafting: part of the seconds that the drafter took.
            levels: number of levels that the drafter's own model drafted; 0 without one.
        """
        decay = self.config.decay
        self._since_plain = self._since_plain + 1 if choice else 0
        if not self.cost.record(choice, seconds - drafting):
            return
        if levels:
            share = self.cost.plain(drafting) / levels
            self._level_cost = decay * self._level_cost + (1 - decay) * share if self._level_cost else share
            self._kept.append(max(self.config.least_nodes, self.nodes[choice]))
        if not tokens:
            return
        given = fmean(tokens)
        if not (choice or drafting):  # a plain round costs 1 by definition
            self._tokens, self._time = decay * self._tokens + given, decay * self._time + 1
            return
        if choice:
            tokens_before, levels_before = self._given.get(choice, (given, levels))
            self._given[choice] = (
                decay * tokens_before + (1 - decay) * given,
                decay * levels_before + (1 - decay) * levels,
            )
        usual = self.cost(choice) + levels * self._level_cost
        # Without candidates, the target's part costs 1 too; otherwise drafts would seem to pay off on a
        # machine that gets faster.
        measured = self.cost.plain(seconds) if choice or levels else 1 + self.cost.plain(drafting)
        time = min(measured, self.config.stall * usual)
        if self.cost.is_measured(PLAIN):
            self._pauses.record(time - given)
        self._tokens, self._time = decay * self._tokens + given, decay * self._time + time
