"""Pauses of drafting where it does not pay off."""

from __future__ import annotations

import math

from mmspec.trees.pacing.config import PacingConfig


class Pauses:
    """Pauses of drafting, each after a trial that did not pay off.

    The first pause takes `first_pause` rounds. Each further one takes twice as many, until drafting has
    gained `proven_gain` after a pause: a single lucky round must not shorten pauses. A pause is longer by the
    factor by which its trial lost more than `trial_loss`.

    The drafter's prefill time is not counted. It would make the first pauses so long that drafting which pays
    off in most texts, but not in the first one, would start many texts later.

    Args:
        config: constants of pacing.
        longest_trial: rounds after which a trial ends at any cost.
    """

    def __init__(self, config: PacingConfig, longest_trial: float = math.inf) -> None:
        self.config, self.longest_trial = config, longest_trial
        self._left, self._next = 0, config.first_pause  # rounds of this pause, and of the next
        # rounds since the last pause, the plain rounds that they gained, and those that they lost lately
        self._tried, self._gained, self._lost = 0, 0.0, 0.0

    def continue_from(self, other: Pauses) -> None:
        """Pause as long as another, whose trials would have lost less."""
        self._left, self._next = other._left, other._next

    def begin_longest(self) -> None:
        """Start the longest pause, before a first trial that is expected to lose."""
        self._left = self.config.longest_pause

    def goes_on(self) -> bool:
        """Count a round of the current pause; False if the pause is over."""
        self._left -= self._left > 0
        return self._left > 0

    def record(self, lost: float) -> None:
        """Record a round of a trial, and its cost minus its tokens, in plain rounds."""
        self._tried, self._gained, self._lost = self._tried + 1, self._gained - lost, self._lost + lost

    def begins(self, pays: bool) -> bool:
        """Start a pause if drafting does not pay off and the trial was long enough; return whether it did."""
        if pays:
            self._lost = max(0.0, self._lost)
            if self._gained >= self.config.proven_gain:
                self._next = self.config.first_pause
            return False
        if self._tried < self.longest_trial and self._lost < self.config.trial_loss:
            return False
        factor = max(1.0, self._lost / self.config.trial_loss)
        self._left = min(round(factor * self._next), self.config.longest_pause)
        self._tried, self._gained, self._lost = 0, 0.0, 0.0
        self._next = min(2 * self._next, self.config.longest_pause)
        return True
