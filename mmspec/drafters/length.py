"""How much to draft, chosen round by round from what rounds have cost and given on this device.

A size is chosen before anything of the round is drawn, and from earlier rounds alone, so no acceptance rule
is biased (text-speculation.md, section 2.3).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean, median
from time import perf_counter

from torch import Tensor

from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.interfaces import Drafter, DraftSession, PromptOutput, Request, TargetOutput
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler, Scores
from mmspec.decoding.verdict import Verdict

__all__ = ["CostModel", "PacedDrafter", "half_lengths"]

PLAIN = 0  # the choice of not drafting
TRIALS, LONG_TRIAL = 3, 16  # rounds of each choice before it is judged; of one that has cost little so far
TRIAL_LOSS = 4.0  # what a trial may cost, in plain rounds
WINDOW = 32  # latest rounds that a choice is judged by
LEAST_SPEEDUP = 1.02
PAUSE, LONGEST_PAUSE = 32, 1024  # plain rounds where no size pays; twice as many after every trial in vain
REVISIT = 48  # rounds of the best size until another choice has one


class CostModel:
    """Which of a few sizes pays best, by tokens per second.

    Item 15 of vlm-drafting.md, section 13: a size speeds decoding up by S = tau / (1 + c_draft * passes +
    c_verify(n)), the costs in units of a plain round. The divisor is measured as a whole, as seconds of a
    round of that size / seconds of a plain one; tau is the tokens of a round. Where no S reaches 1.02,
    nothing is drafted for 32 rounds, then the best size is tried again; in vain, for 64, and so on.

    Args:
        sizes: how many there are; choices are 0, not to draft, and then 1 to `sizes`.
    """

    def __init__(self, sizes: int) -> None:
        self._rounds: list[deque[tuple[float, float]]] = [deque(maxlen=WINDOW) for _ in range(sizes + 1)]
        self._pause, self._next_pause = 0, PAUSE
        self._drafted = 0

    def choose(self) -> int:
        """What to do in the next round."""
        if self._pause:
            self._pause -= 1
            return PLAIN
        for choice in range(len(self._rounds)):
            if self._is_on_trial(choice):
                return choice
        best = max(range(1, len(self._rounds)), key=self.speedup)
        if self.speedup(best) < LEAST_SPEEDUP:
            self._rounds[best].clear()
            self._pause = self._next_pause - 1
            self._next_pause = min(2 * self._next_pause, LONGEST_PAUSE)
            return PLAIN
        self._next_pause = PAUSE
        self._drafted += 1
        visits, rest = divmod(self._drafted, REVISIT)
        return best if rest else visits % len(self._rounds)

    def record(self, choice: int, tokens: float, seconds: float) -> None:
        """Note what a round gave, in tokens a row, and took."""
        self._rounds[choice].append((tokens, seconds))

    def speedup(self, choice: int) -> float:
        """S: how many times the tokens per second of plain decoding."""
        tokens = fmean(given for given, _ in self._rounds[choice])
        return tokens * self._seconds(PLAIN) / self._seconds(choice)

    def _is_on_trial(self, choice: int) -> bool:
        """Whether too little is known of a choice: what is rarely accepted may be accepted at length."""
        rounds = self._rounds[choice]
        if len(rounds) < TRIALS:
            return True
        if choice == PLAIN or len(rounds) >= LONG_TRIAL:
            return False
        plain = self._seconds(PLAIN)
        return 0 < sum(taken / plain - given for given, taken in rounds) < TRIAL_LOSS

    def _seconds(self, choice: int) -> float:
        """Of a round."""
        return median(taken for _, taken in self._rounds[choice])


class PacedDrafter(Drafter):
    """A drafter the size of whose drafts is chosen by a measured cost model, one for each batch size.

    Args:
        inner: who proposes.
        models: what is known so far, by batch size; it outlives the calls.
        clock: seconds; another one for tests.
    """

    def __init__(
        self, inner: Drafter, models: dict[int, CostModel], clock: Callable[[], float] = perf_counter
    ) -> None:
        self.inner, self.models, self.clock = inner, models, clock
        self.kind, self.max_nodes = inner.kind, inner.max_nodes
        self.taps, self.branches = inner.taps, inner.branches

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: Sampler, random: RandomStream
    ) -> DraftSession:
        session = self.inner.start(requests, prefill, sampler, random)
        model = self.models.setdefault(len(requests), CostModel(len(self.inner.sizes)))
        nothing = None
        if self.kind in (DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT):  # sampled kinds say their laws
            nothing = prefill.logits.new_zeros(len(requests), 1, prefill.logits.shape[-1])
        return PacedSession(self, session, model, nothing)


class PacedSession(DraftSession):
    """A session that is told its size before every round, or is left out of it.

    A round lasts from one proposal to the next: only then has the host seen what came of it.
    """

    def __init__(
        self, drafter: PacedDrafter, inner: DraftSession, model: CostModel, nothing: Tensor | None
    ) -> None:
        self.drafter, self.inner, self.model, self.nothing = drafter, inner, model, nothing
        self.choice: int | None = None
        self.started = 0.0
        self.lengths: list[int] = []

    def propose(self, root: Tensor, emitted: Tensor, history: Sequence[Sequence[int]]) -> Draft:
        now, lengths = self.drafter.clock(), [len(row) for row in history]
        if self.choice is not None:
            grown = [new - old for new, old in zip(lengths, self.lengths, strict=True) if new > old]
            self.model.record(self.choice, fmean(grown), now - self.started)
        self.choice, self.started, self.lengths = self.model.choose(), now, lengths
        if self.choice == PLAIN:
            return Draft.chain(root[:, None], self.drafter.kind, self.nothing)
        self.inner.resize(self.drafter.inner.sizes[self.choice - 1])
        draft = self.inner.propose(root, emitted, history)
        self.passes = self.inner.passes
        return draft

    def observe(self, draft: Draft, output: TargetOutput, scores: Scores, verdict: Verdict) -> None:
        self.inner.observe(draft, output, scores, verdict)


def half_lengths(length: int) -> tuple[int, ...]:
    """Sizes of a chain: all of it, half of it, a quarter of it."""
    return tuple(dict.fromkeys((length, -(-length // 2), -(-length // 4))))
