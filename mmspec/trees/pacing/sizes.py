"""Policy that chooses the size of a draft in advance."""

from __future__ import annotations

from collections.abc import Sequence
from statistics import fmean
from typing import Self

from mmspec.trees.pacing.config import DEFAULT_PACING, PacingConfig
from mmspec.trees.pacing.costs import PLAIN, RoundCosts
from mmspec.trees.pacing.pauses import Pauses


class SizePolicy:
    """Chooses the draft size of largest speed-up, on this device and for this text.

    The speed-up of a size is S = tokens / cost of its rounds. The cost is measured as a whole; in a cost
    model it would be 1 + c_draft * passes + c_verify(n). A size without measurements has an estimated cost,
    and gets rounds if it could be the best.

    The tokens of a round follow from the rate at which each depth is accepted once it is reached. Rates are
    ratios of counts that decay by omega each round, as in DEL (2504.05598), and all sizes share them. Wide
    trees yield more tokens than depth alone predicts, by a factor that each size estimates for itself and
    that fades while it is not used. If no S reaches `least_speedup`, drafting pauses.

    Args:
        depths: deepest level of each size, the most expensive size first. Choice 0 is the plain round, and
            choices 1, 2, ... are these.
        config: constants of pacing.
        rows: number of rows of the rounds.
        nodes: number of candidates of each size; those of chains by default.
    """

    def __init__(
        self,
        depths: Sequence[int],
        config: PacingConfig = DEFAULT_PACING,
        rows: int = 1,
        nodes: Sequence[int] = (),
    ) -> None:
        self.depths, self.config, self.rows = (0, *depths), config, rows
        self.cost = RoundCosts((0, *(nodes or depths)), config, rows)
        self._pauses = Pauses(config, config.longest_trial)
        self._reached, self._accepted = ([0.0] * max(self.depths) for _ in range(2))  # decayed, by depth
        self._surplus = [1.0] * len(self.depths)  # measured tokens over those that depth alone predicts
        self._drafted = 0  # rounds

    def continue_from(self, other: Self) -> None:
        """Take over the rates of another number of rows, and its pause if drafts cost more here."""
        self._reached, self._accepted = other._reached, other._accepted  # both go on counting
        self.cost.continue_from(other.cost)
        if self.rows > other.rows:
            self._pauses.continue_from(other._pauses)

    def rest_unless_promising(self) -> None:
        """Postpone the first trial if even the estimated costs, without the drafter's, are too high."""
        if max(map(self.speedup, range(1, len(self.depths)))) < self.config.least_speedup:
            self._pauses.begin_longest()

    def choose(self) -> int:
        """Choose the next draft's size: 0 for none, or an index into `depths`."""
        if self._pauses.goes_on() or not self.cost.is_measured(PLAIN):
            return PLAIN
        sizes = range(len(self.depths) - 1, 0, -1)  # the cheapest first: all sizes share its rates
        measured = [self.speedup(size) for size in sizes if self.cost.is_measured(size)]
        bar = max(measured, default=self.config.least_speedup)
        for size in sizes:
            if not self.cost.is_measured(size) and self.speedup(size) >= bar:
                return size
        best = max(sizes, key=self.speedup)
        if self._pauses.begins(pays=self.speedup(best) >= self.config.least_speedup):
            return PLAIN
        self._drafted += 1
        visits, rest = divmod(self._drafted, self.config.revisit_rounds)
        return best if rest else visits % len(self.depths)

    def record(self, choice: int, tokens: Sequence[int], seconds: float) -> None:
        """Record a round: its choice, the tokens of each unfinished row, and its time."""
        counts = self.cost.record(choice, seconds)
        if choice == PLAIN or not tokens:
            return
        given, decay, fade = fmean(tokens), self.config.decay, self.config.fade
        for depth in range(min(self.depths[choice], max(tokens))):
            self._reached[depth] = decay * self._reached[depth] + sum(count > depth for count in tokens)
            self._accepted[depth] = decay * self._accepted[depth] + sum(count > depth + 1 for count in tokens)
        surplus = given / self._expected_tokens(choice)
        self._surplus = [fade * known + (1 - fade) for known in self._surplus]
        self._surplus[choice] = decay * self._surplus[choice] + (1 - decay) * surplus
        if counts:
            self._pauses.record(self.cost.plain(seconds) - given)

    def speedup(self, choice: int) -> float:
        """Speed-up S of a choice: its tokens per second divided by those of plain decoding."""
        return self._expected_tokens(choice) * self._surplus[choice] / self.cost(choice)

    def _expected_tokens(self, choice: int) -> float:
        """Expected tokens of a round, the bonus token included, from the rates of the depths alone.

        The prior of each depth's rate is the rate of the depth before it; that of the first is 0.5.
        """
        tokens, path, rate, prior = 1.0, 1.0, 0.5, self.config.prior
        depth = self.depths[choice]
        for reached, accepted in zip(self._reached[:depth], self._accepted[:depth], strict=True):
            rate = (accepted + prior * rate) / (reached + prior)
            path *= rate
            tokens += path
        return tokens


def half_lengths(length: int) -> tuple[int, ...]:
    """Sizes of a chain: its length, half of that rounded up, and so on down to 1."""
    return (length, *half_lengths(-(-length // 2))) if length > 1 else (1,)
