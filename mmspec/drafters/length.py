"""Draft length, chosen round by round from the measured seconds and tokens of earlier rounds.

A size is chosen before anything of the round is drawn, so no acceptance rule is biased; to drop a token for
its own low q, once drawn, would bias it.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median
from time import perf_counter

from mmspec.decoding.canvas import Canvas, Stopping
from mmspec.decoding.distribution import Categorical, Scores
from mmspec.decoding.draft import Draft, DraftKind, Tree
from mmspec.decoding.interfaces import Drafter, DraftSession, Request, TargetOutput
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.verdict import Path
from mmspec.drafters.session import PromptBatch, SessionDrafter

__all__ = ["CostModel", "PacedDrafter", "half_lengths"]

PLAIN = 0  # the choice of not drafting
TRIALS = 3  # rounds of a choice before it is judged
WINDOW = 16  # latest rounds that a choice's seconds are the median of; the least of them while there are few
KEEP = 0.95  # decay of the counts of acceptance in a round: omega of DEL (2504.05598)
FADE = 0.98  # decay in a round of what is known of a size alone: the text may have changed
DOUBT = 4.0  # times that a depth must be reached to count as much as the one before, which it is taken for
REVISIT = 64  # rounds of the best size until another choice has one
LEAST_SPEEDUP = 1.02
PAUSE, LONGEST_PAUSE = 32, 1024  # plain rounds where no size pays; twice as many after every trial in vain
LONG_TRIAL, TRIAL_LOSS = 16, 4.0  # rounds until a trial is in vain, or plain rounds that it may cost
PACE = 0.95  # decay in a round of the tokens and costs that the worth of time follows from


class CostModel:
    """Cost model that chooses the draft size of largest speed-up on this device and this text.

    A size speeds decoding up by S = tau / (1 + c_draft * passes + c_verify(n)), costs in plain rounds. The
    divisor is measured as a whole: the seconds of a round of that size over those of a plain one. A size that
    was not measured yet is taken for as cheap as the next smaller one, and is tried if it could be the best.

    The tokens of a round, tau, follow from how often each depth is accepted once it is reached, which all
    sizes learn together. Wide trees give more than that; how much, each size learns for itself, and forgets
    while it is not used. Where no S reaches 1.02, nothing is drafted for 32 rounds, and then the best size is
    tried again; in vain, for 64, and so on.

    Drafters that know the tokens to expect of each size before a round say so. Rounds then differ, and the
    size is taken that gives the most tokens beyond those that its time would give otherwise.

    Args:
        depths: the deepest that each size can be accepted to, the most expensive size first. Choices are 0,
            not to draft, and then 1, 2, ... for these.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        self.depths = (0, *depths)
        self._seconds: list[deque[float]] = [deque(maxlen=WINDOW) for _ in self.depths]
        self._reached, self._accepted = ([0.0] * max(self.depths) for _ in range(2))
        self._surplus = [1.0] * len(self.depths)  # tokens that were given / that depth alone predicted
        self._pause, self._next_pause = 0, PAUSE
        self._tried, self._lost = 0, 0.0  # rounds since the last pause, and the plain rounds they cost
        self._drafted = 0
        self._tokens, self._costs = 1 / (1 - PACE), 1 / (1 - PACE)  # of late, in tokens and plain rounds

    def choose(self, expected: Sequence[float] | None = None) -> int:
        """Choose the size of the next draft: 0 for none, or 1, 2, ... for `depths`.

        Args:
            expected: tokens of the next round with each size, where the drafter knows; None to learn them.
        """
        if self._pause:
            self._pause -= 1
            return PLAIN
        if len(self._seconds[PLAIN]) < TRIALS:
            return PLAIN
        sizes = range(len(self.depths) - 1, 0, -1)  # the cheapest first, which teaches about the others
        if expected is not None:
            worth = max(1.0, self._tokens / self._costs)  # tokens that a plain round's time gives otherwise
            gains = {size: expected[size - 1] - worth * self.cost(size) for size in sizes}
            gains[PLAIN] = 1 - worth
            return max(gains, key=gains.__getitem__)
        best = max(sizes, key=self.speedup)
        known = [self.speedup(size) for size in sizes if len(self._seconds[size]) >= TRIALS]
        for size in sizes:
            if len(self._seconds[size]) < TRIALS and self.speedup(size) >= max(known, default=LEAST_SPEEDUP):
                return size
        if self.speedup(best) >= LEAST_SPEEDUP:
            self._next_pause = PAUSE
        elif self._tried >= LONG_TRIAL or self._lost >= TRIAL_LOSS:
            self._tried, self._lost = 0, 0.0
            self._pause = self._next_pause - 1
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
            return PLAIN
        self._drafted += 1
        visits, rest = divmod(self._drafted, REVISIT)
        return best if rest else visits % len(self.depths)

    def record(self, choice: int, tokens: Sequence[int], seconds: float) -> None:
        """Record a round: the tokens of each row, and the seconds of all."""
        self._seconds[choice].append(seconds)
        given = fmean(tokens) if tokens else 0.0
        if plain := self._seconds[PLAIN]:
            cost = seconds / median(plain)
            self._tokens, self._costs = PACE * self._tokens + given, PACE * self._costs + cost
            self._tried, self._lost = self._tried + (choice > 0), self._lost + (cost - given) * (choice > 0)
        if choice == PLAIN or not tokens:
            return
        for depth in range(min(self.depths[choice], max(tokens))):
            self._reached[depth] = KEEP * self._reached[depth] + sum(count > depth for count in tokens)
            self._accepted[depth] = KEEP * self._accepted[depth] + sum(count > depth + 1 for count in tokens)
        surplus = given / self._expected_tokens(choice)
        self._surplus = [FADE * known + (1 - FADE) for known in self._surplus]
        self._surplus[choice] = KEEP * self._surplus[choice] + (1 - KEEP) * surplus

    def cost(self, choice: int) -> float:
        """Seconds of a round of a choice over those of a plain one, at the least where it is not measured."""
        measured, plain = self._seconds[choice], median(self._seconds[PLAIN])
        if 2 * len(measured) >= WINDOW:
            return median(measured) / plain
        cheaper = self.cost(choice + 1) if choice + 1 < len(self.depths) else 1.0
        return max(cheaper, min(measured) / plain) if measured else cheaper

    def speedup(self, choice: int) -> float:
        """Speed-up S of a choice: its tokens per second over those of plain decoding."""
        return self._expected_tokens(choice) * self._surplus[choice] / self.cost(choice)

    def _expected_tokens(self, choice: int) -> float:
        """Expected tokens of a round, bonus included, as far as the depth alone tells."""
        tokens, path, rate = 1.0, 1.0, 0.5
        depth = self.depths[choice]
        for reached, accepted in zip(self._reached[:depth], self._accepted[:depth], strict=True):
            rate = (accepted + DOUBT * rate) / (reached + DOUBT)
            path *= rate
            tokens += path
        return tokens


class PacedSession(DraftSession):
    """Wraps a session: sets its size before every round, or drafts nothing.

    A round lasts from one proposal to the next: only then has the host read what it gave.
    """

    def __init__(self, drafter: PacedDrafter, batch: PromptBatch) -> None:
        self.drafter, inner, rows = drafter, drafter.inner, len(batch.requests)
        self.inner = inner.start(batch.requests, batch.prefill, batch.sampler, batch.random)
        self.model = drafter.models.setdefault(rows, CostModel(inner.sizes))
        none = batch.prefill.logits.new_zeros(rows, 0, batch.prefill.logits.shape[-1])
        is_drawn = drafter.kind in (DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT)
        self.nothing = Categorical(none) if is_drawn else None
        self.choice: int | None = None
        self.started = 0.0
        self.lengths: list[int] = []

    def propose(self, canvas: Canvas) -> Draft:
        now, lengths = self.drafter.clock(), list(canvas.output_lengths)
        if self.choice is not None:
            grown = [new - old for new, old in zip(lengths, self.lengths, strict=True) if new > old]
            self.model.record(self.choice, grown, now - self.started)
        expected = self.inner.expect(canvas)
        self.choice, self.started, self.lengths = self.model.choose(expected), now, lengths
        if self.choice == PLAIN:
            return Tree.chain(canvas.root[:, None], self.drafter.kind, self.nothing)
        self.inner.resize(self.choice - 1)
        draft = self.inner.propose(canvas)
        self.passes = self.inner.passes
        return draft

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        self.inner.observe(draft, output, scores, verdict)


class PacedDrafter(SessionDrafter):
    """Wraps a drafter whose draft size a measured cost model chooses, one for each batch size.

    Args:
        inner: the drafter that proposes.
        models: cost models by batch size; they outlive the calls.
        clock: returns seconds.
    """

    session = PacedSession

    def __init__(
        self, inner: Drafter, models: dict[int, CostModel], clock: Callable[[], float] = perf_counter
    ) -> None:
        self.inner, self.models, self.clock = inner, models, clock
        self.kind, self.max_nodes = inner.kind, inner.max_nodes
        self.taps, self.branches = inner.taps, inner.branches

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        self.inner.admit(requests, sampler, stopping)


def half_lengths(length: int) -> tuple[int, ...]:
    """Sizes of a chain: all of it, half of it, a quarter of it, and so on."""
    return (length, *half_lengths(-(-length // 2))) if length > 1 else (1,)
