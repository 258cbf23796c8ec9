"""Draft size, chosen round by round from the measured seconds and tokens of earlier rounds.

A size is chosen before anything of the round is drawn, so no acceptance rule is biased; to drop a token for
its own low q, once drawn, would bias it. Drafts of which nothing is drawn are pruned once they are there.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import accumulate
from statistics import fmean, median
from time import perf_counter
from typing import cast

import torch
from torch import nn

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.core.graphs import can_capture
from mmspec.core.interfaces import Drafter, DraftSession, Request, TargetOutput, TargetState
from mmspec.core.sampling import Sampler
from mmspec.core.session import PromptBatch, SessionDrafter
from mmspec.core.verdict import Path

__all__ = ["AnyModel", "CostModel", "PacedDrafter", "PruningModel", "half_lengths"]

PLAIN = 0  # the choice of not drafting
TRIALS = 3  # rounds of a choice before it is judged
WINDOW = 8  # latest rounds that a choice's seconds are the median of; the least of them while there are few
KEEP = 0.95  # decay of the counts of acceptance in a round: omega of DEL (2504.05598)
FADE = 0.98  # decay in a round of what is known of a size alone: the text may have changed
DOUBT = 4.0  # times that a depth must be reached to count as much as the one before, which it is taken for
REVISIT = 64  # rounds of the best size until another choice has one
REMEASURE = 32  # rounds until a plain one is measured again: contexts grow, and machines are busy
GUESS = 0.06  # cost of a candidate where it is not measured
LEAST_SPEEDUP = 1.02
STALLED = 2.0  # times what rounds of its kind cost that one counts for: beyond that, other work took the time
PAUSE, LONGEST_PAUSE = 32, 1024  # plain rounds where nothing pays; twice as many after every trial in vain
LONG_TRIAL, TRIAL_LOSS = 16, 3.0  # rounds until a trial is in vain, or plain rounds that it may cost
OWN_WORK = 6.0  # times that the time of a head in a trial makes the pause longer: it soon shows what it gives
RATE = 0.7  # at which a candidate is right behind a path that is, for a look ahead
LEAST_NODES = 2
#: Edges of the bins of probabilities that are calibrated apart.
BINS = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)


class RoundCosts:
    """Costs of rounds by size, in plain rounds, of which the latest are the measure.

    Args:
        sizes: nodes, or depth, of each choice: 0 for a plain round, then the largest, and so on.
    """

    def __init__(self, sizes: Sequence[int]) -> None:
        self.sizes = sizes
        self.seconds: list[deque[float]] = [deque(maxlen=WINDOW) for _ in sizes]
        self._prepared: set[int] = {PLAIN}

    def record(self, choice: int, seconds: float) -> bool:
        """Record a round; False, and nothing is recorded, where it was the first of its size and prepared it.

        The first round of a size may compile or capture it, or pack layers. It counts where it took less than
        twice its guess, which is a round that prepared nothing.
        """
        is_first = choice not in self._prepared
        self._prepared.add(choice)
        if is_first and self.plain(seconds) > STALLED * self(choice):
            return False
        self.seconds[choice].append(seconds)
        return True

    @property
    def begins(self) -> bool:
        """True while plain rounds are to be measured."""
        return len(self.seconds[PLAIN]) < TRIALS

    def plain(self, seconds: float) -> float:
        """Seconds in plain rounds; 0 as long as none was measured."""
        known = self.seconds[PLAIN]
        return seconds / median(known) if known else 0.0

    def __call__(self, choice: int) -> float:
        """Cost of a round of a choice; where it is not measured, a guess more than the next smaller one's."""
        measured = self.seconds[choice]
        if measured and self.seconds[PLAIN]:
            return self.plain(median(measured) if 2 * len(measured) >= WINDOW else min(measured))
        if choice == PLAIN:
            return 1.0
        smaller = choice + 1 if choice + 1 < len(self.sizes) else PLAIN
        return self(smaller) + GUESS * (self.sizes[choice] - self.sizes[smaller])


class Pauses:
    """Pauses of drafting where it does not pay: 32 plain rounds, twice as many after every trial in vain.

    They are as many times longer as a trial cost more than the three plain rounds that end it, which it does
    where the drafter read the prompts first, and longer still where it has a model of its own: copies cost
    nothing until they are proposed, and soon there may be some.

    Args:
        longest: rounds until a trial is in vain whatever it cost.
    """

    def __init__(self, longest: float = math.inf) -> None:
        self.longest, self._left, self._next = longest, 0, PAUSE
        self._tried, self._lost = 0, 0.0  # rounds since the last pause, and the plain rounds they cost
        self._longer = 0.0  # plain rounds that the next pause is longer by

    def goes_on(self) -> bool:
        """Count a round of the pause; False where there is none."""
        self._left -= self._left > 0
        return self._left > 0

    def record(self, lost: float) -> None:
        """Record a round of a trial, and the plain rounds that it cost beyond the tokens that it gave."""
        self._tried, self._lost = self._tried + 1, self._lost + lost

    def lengthen(self, rounds: float) -> None:
        """Record plain rounds that count towards the next pause alone, if drafts do not pay before it."""
        self._longer += rounds

    def judge(self, pays: bool) -> bool:
        """Begin a pause where drafting does not pay and a trial has been long enough; True if one begins."""
        if pays:
            self._next, self._lost, self._longer = PAUSE, 0.0, 0.0
        elif self._tried >= self.longest or self._lost >= TRIAL_LOSS:
            times = max(1.0, (self._lost + self._longer) / TRIAL_LOSS)
            self._left = min(round(times * self._next), LONGEST_PAUSE)
            self._tried, self._lost, self._longer = 0, 0.0, 0.0
            self._next = min(2 * self._next, LONGEST_PAUSE)
            return True
        return False


class CostModel:
    """Cost model that chooses the draft size of largest speed-up on this device and this text.

    A size speeds decoding up by S = tau / (1 + c_draft * passes + c_verify(n)), costs in plain rounds. The
    divisor is measured as a whole: the seconds of a round of that size over those of a plain one. A size that
    was not measured yet is taken for a little more than the next smaller one, and tried if it could be best.

    The tokens of a round, tau, follow from how often each depth is accepted once it is reached, which all
    sizes learn together. Wide trees give more than that; how much, each size learns for itself, and forgets
    while it is not used. Where no S reaches 1.02, nothing is drafted for 32 rounds, and then the best size is
    tried again; in vain, for 64, and so on.

    Args:
        depths: the deepest that each size can be accepted to, the most expensive size first. Choices are 0,
            not to draft, and then 1, 2, ... for these.
    """

    def __init__(self, depths: Sequence[int]) -> None:
        self.depths = (0, *depths)
        self.cost, self._pauses = RoundCosts(self.depths), Pauses(LONG_TRIAL)
        self._reached, self._accepted = ([0.0] * max(self.depths) for _ in range(2))
        self._surplus = [1.0] * len(self.depths)  # tokens that were given / that depth alone predicted
        self._drafted = 0

    def choose(self) -> int:
        """Choose the size of the next draft: 0 for none, or 1, 2, ... for `depths`."""
        if self._pauses.goes_on() or self.cost.begins:
            return PLAIN
        sizes, seconds = range(len(self.depths) - 1, 0, -1), self.cost.seconds
        known = [self.speedup(size) for size in sizes if len(seconds[size]) >= TRIALS]
        for size in sizes:  # the cheapest first, which teaches about the others
            if len(seconds[size]) < TRIALS and self.speedup(size) >= max(known, default=LEAST_SPEEDUP):
                return size
        best = max(sizes, key=self.speedup)
        if self._pauses.judge(self.speedup(best) >= LEAST_SPEEDUP):
            return PLAIN
        self._drafted += 1
        visits, rest = divmod(self._drafted, REVISIT)
        return best if rest else visits % len(self.depths)

    def read(self, seconds: float) -> None:
        """Record what reading the prompts took."""
        self._pauses.lengthen(self.cost.plain(seconds))

    def record(self, choice: int, tokens: Sequence[int], seconds: float) -> None:
        """Record a round: the tokens of each row, and the seconds of all."""
        counts = self.cost.record(choice, seconds)
        if choice == PLAIN or not tokens:
            return
        given = fmean(tokens)
        for depth in range(min(self.depths[choice], max(tokens))):
            self._reached[depth] = KEEP * self._reached[depth] + sum(count > depth for count in tokens)
            self._accepted[depth] = KEEP * self._accepted[depth] + sum(count > depth + 1 for count in tokens)
        surplus = given / self._expected_tokens(choice)
        self._surplus = [FADE * known + (1 - FADE) for known in self._surplus]
        self._surplus[choice] = KEEP * self._surplus[choice] + (1 - KEEP) * surplus
        if counts:
            self._pauses.record(self.cost.plain(seconds) - given)

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


@dataclass(frozen=True)
class Candidate:
    """Candidate of a draft, as its drafter rates it.

    Attributes:
        node: its index in the draft.
        parent: that of its parent.
        token: its id.
        share: probability that it is right if its parent is, as the drafter has it.
        path: probability that its whole path is right, calibrated.
    """

    node: int
    parent: int
    token: int
    share: float
    path: float


class Calibration:
    """Calibration of a drafter's probabilities: how often candidates of about that probability were right."""

    def __init__(self) -> None:
        self._seen, self._right = ([0.0] * (len(BINS) + 1) for _ in range(2))

    def __call__(self, share: float) -> float:
        """Return how often a candidate is right that the drafter gives a probability."""
        at = bin_of(share)
        return (self._right[at] + DOUBT * share) / (self._seen[at] + DOUBT)

    def learn(self, candidates: Sequence[Candidate], tokens: Sequence[int]) -> None:
        """Learn from the tokens that came after a draft, as far as its candidates had their places there."""
        parent: int | None = 0
        for token in tokens:
            siblings = [each for each in candidates if each.parent == parent]
            parent = None
            for each in siblings:
                at, is_right = bin_of(each.share), each.token == token
                self._seen[at] = FADE * self._seen[at] + 1
                self._right[at] = FADE * self._right[at] + is_right
                parent = each.node if is_right else parent
            if parent is None:
                return


def bin_of(share: float) -> int:
    """Index of the bin of a probability."""
    return sum(share > edge for edge in BINS)


class PruningModel:
    """Model of costs and worth that keeps as many candidates of a draft as pay on this device.

    A round gives 1 + the sum of the probabilities that the paths to its candidates are right. It takes more
    time the more there are: the likeliest n are kept for which the tokens, less those that their time would
    give otherwise, are the most. Where drafting has lost three plain rounds and gives less than 1.02 times
    what plain rounds do, it pauses as of `CostModel`. A drafter that reads probes has candidates only after a
    round with probes: its rounds are plain in pauses alone, and cost what the probes cost, too.

    Args:
        nodes: the most candidates that each size keeps, the largest first. Choices are 0, and then 1, 2, ...
            for these.
        probes: of a draft of each of these sizes; none by default.
    """

    def __init__(self, nodes: Sequence[int], probes: Sequence[int] = ()) -> None:
        self.nodes = (0, *nodes)
        sizes = [size + read for size, read in zip(nodes, probes or [0] * len(nodes), strict=True)]
        self.cost, self._pauses, self._probes = RoundCosts((0, *sizes)), Pauses(), any(probes)
        self.calibrate = Calibration()
        self._tokens = self._time = 1 / (1 - KEEP)  # of late, in tokens and plain rounds
        self._since_plain = 0
        self._level = 0.0  # cost of drafting a level
        self._kept: deque[int] = deque([LEAST_NODES], maxlen=WINDOW)  # candidates of late

    @property
    def worth(self) -> float:
        """Tokens that the time of a plain round gives, of late."""
        return max(1.0, self._tokens / self._time)

    @property
    def limit(self) -> int:
        """The most candidates that are worth drafting: twice as many as were kept of late."""
        return 2 * max(self._kept)

    def least(self, depth: int) -> list[float]:
        """Probabilities of the likeliest path that each level must have so that another one is drafted.

        Another level gives that path's probability times the rate at which what follows is right. It costs
        the drafter's time, and the time of more candidates, at best that of several of them together.
        """
        costs = [self._cost_of(nodes) for nodes in range(depth + 1)]
        found = []
        for level in range(1, depth):
            more = min((costs[deep] - costs[level]) / (deep - level) for deep in range(level + 1, depth + 1))
            found.append(min(1.0, self.worth * (self._level + more) / RATE))
        return found

    def _cost_of(self, nodes: int) -> float:
        """Cost of a round with so many candidates, between those of the sizes."""
        large = [size for size in range(1, len(self.nodes)) if self.nodes[size] >= nodes]
        after = max(large, default=1)
        before = after + 1 if after + 1 < len(self.nodes) else PLAIN
        low, high = self.nodes[before], self.nodes[after]
        share = min(1.0, (nodes - low) / (high - low))
        return (1 - share) * self.cost(before) + share * self.cost(after)

    def rests(self) -> bool:
        """Whether nothing is to be drafted in the next round."""
        if self._pauses.goes_on() or self.cost.begins or self._since_plain >= REMEASURE:
            return True
        return self._pauses.judge(self._tokens / self._time >= LEAST_SPEEDUP)

    def choose(self, sums: Sequence[Sequence[float]]) -> int:
        """Choose a size for a draft of which the tokens are expected that the likeliest 0, 1, ... give."""
        worth, best = self.worth, PLAIN
        most = -math.inf if self._probes else 1.0 - worth
        for size in range(len(self.nodes) - 1, 0, -1):
            expected = fmean(row[min(self.nodes[size], len(row) - 1)] for row in sums)
            gain = expected - worth * self.cost(size)
            if gain > most:
                best, most = size, gain
        return best

    def read(self, seconds: float) -> None:
        """Record what reading the prompts took."""
        self._pauses.lengthen(self.cost.plain(seconds))

    def record(
        self, choice: int, tokens: Sequence[int], seconds: float, drafting: float, levels: int
    ) -> None:
        """Record a round.

        Args:
            choice: its size.
            tokens: of each row.
            seconds: of all.
            drafting: seconds of those that the drafter took.
            levels: that it drafted.
        """
        self._since_plain = self._since_plain + 1 if choice else 0
        if not self.cost.record(choice, seconds - drafting):
            return
        if levels:
            share = self.cost.plain(drafting) / levels
            self._level = share if not self._level else KEEP * self._level + (1 - KEEP) * share
            self._kept.append(max(LEAST_NODES, self.nodes[choice]))
            self._pauses.lengthen(OWN_WORK * self.cost.plain(drafting))
        if not tokens:
            return
        usual = self.cost(choice) + levels * self._level
        given, time = fmean(tokens), min(self.cost.plain(seconds), STALLED * usual)
        if choice == PLAIN and not levels:
            time = 1.0  # by definition: a machine that is faster for a while does not make drafts pay
        if not self.cost.begins and (choice or levels):
            self._pauses.record(time - given)
        self._tokens, self._time = KEEP * self._tokens + given, KEEP * self._time + time


AnyModel = CostModel | PruningModel


class PacedSession(DraftSession):
    """Wraps a session: sets its size before every round, prunes what it drafts, or drafts nothing.

    A round lasts from one proposal to the next: only then has the host read what it gave. Reading the
    prompts, once in a call, is no part of it: that takes as long however much is drafted.
    """

    def __init__(self, drafter: PacedDrafter, batch: PromptBatch) -> None:
        self.drafter, rows = drafter, len(batch.requests)
        self.inner = drafter.inner.start(batch.requests, batch.prefill, batch.sampler, batch.random)
        self.model = drafter.models.setdefault(rows, drafter.new_model())
        none = batch.prefill.logits.new_zeros(rows, 0, batch.prefill.logits.shape[-1])
        is_drawn = drafter.kind in (DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT)
        self.nothing = Categorical(none) if is_drawn else None
        self.choice: int | None = None
        self.started = self.drafted = 0.0
        self.levels = 0  # that a model of the drafter's own has drafted in the latest round
        self.lengths: list[int] = []
        self.candidates: list[list[Candidate]] = []

    def propose(self, canvas: Canvas) -> Draft:
        now, lengths, before = self.drafter.clock(), list(canvas.output_lengths), self.lengths
        grown = [] if self.choice is None else [new - old for new, old in zip(lengths, before, strict=True)]
        counts, seconds, self.started = [count for count in grown if count], now - self.started, now
        if isinstance(self.model, PruningModel):
            if self.choice is not None:
                self.model.record(self.choice, counts, seconds, self.drafted, self.levels)
            draft: Draft = self._pruned(canvas, self.model, grown)
        else:
            if self.choice is not None:
                self.model.record(self.choice, counts, seconds)
            self.choice = self.model.choose()
            if self.choice == PLAIN:
                draft = self._nothing(canvas)
            else:
                self.prepare()
                self.inner.resize(self.choice - 1)
                draft = self.inner.propose(canvas)
        self.lengths, self.passes = lengths, self.inner.passes
        return draft

    def prepare(self) -> None:
        begun = self.drafter.clock()
        self.inner.prepare()
        self.started = self.drafter.clock()
        self.model.read(self.started - begun)

    def attach(self, state: TargetState) -> None:
        self.inner.attach(state)

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        self.inner.observe(draft, output, scores, verdict)

    def _nothing(self, canvas: Canvas) -> Tree:
        return Tree.chain(canvas.root[:, None], self.drafter.kind, self.nothing)

    def _pruned(self, canvas: Canvas, model: PruningModel, grown: Sequence[int]) -> Tree:
        """Draft, and keep what pays."""
        for row, (count, candidates) in enumerate(zip(grown, self.candidates, strict=bool(self.candidates))):
            if count:
                model.calibrate.learn(candidates, canvas.ids[row][-count:])
        before, self.levels, self.drafted, self.candidates = self.inner.passes, 0, 0.0, []
        self.choice = PLAIN
        if model.rests():
            return self._nothing(canvas)
        self.prepare()
        self.inner.limit(model.limit, model.least)
        draft = cast(Tree, self.inner.propose(canvas))  # of drafters that rate paths
        self.levels = draft.max_depth if self.inner.passes > before else 0
        self.candidates = self._rated(draft, model)
        going = [c for c, ended in zip(self.candidates, canvas.finish_reasons, strict=True) if ended is None]
        sums = [list(accumulate((each.path for each in row), initial=1.0)) for row in going]
        self.choice = model.choose(sums)
        kept = [[each.node for each in row[: model.nodes[self.choice]]] for row in self.candidates]
        most = max(map(len, kept))
        if can_capture(canvas.device):  # few sizes, since a forward is captured for each
            most = min(size for size in model.nodes if size >= most)
        if most + 1 < draft.tokens.shape[1]:
            draft = draft.part_of(kept, most)
        self.drafted = self.drafter.clock() - self.started
        return draft

    def _rated(self, draft: Tree, model: PruningModel) -> list[list[Candidate]]:
        """The candidates of each row, the likeliest first and parents before their children."""
        found = []
        told = draft.tokens.double(), draft.parents.double(), self.inner.likelihoods.double()
        for tokens, parents, scores in torch.stack(told, 1).tolist():
            paths, row = [1.0], []
            for node in range(1, len(tokens)):
                parent = int(parents[node])
                share = math.exp(scores[node] - scores[parent]) if scores[node] > -math.inf else 0.0
                paths.append(paths[parent] * min(1.0, model.calibrate(share)) if share else 0.0)
                row.append(Candidate(node, parent, int(tokens[node]), share, paths[node]))
            found.append(sorted((each for each in row if each.path), key=lambda each: -each.path))
        return found


class PacedDrafter(SessionDrafter):
    """Wraps a drafter whose draft size a measured cost model chooses, one for each batch size.

    Args:
        inner: the drafter that proposes.
        models: cost models by batch size; they outlive the calls.
        clock: returns seconds.
    """

    session = PacedSession

    def __init__(
        self, inner: Drafter, models: dict[int, AnyModel], clock: Callable[[], float] = perf_counter
    ) -> None:
        self.inner, self.models, self.clock = inner, models, clock
        self.kind, self.max_nodes = inner.kind, inner.max_nodes
        self.taps, self.branches = inner.taps, inner.branches

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self.inner.modules

    def new_model(self) -> AnyModel:
        """Make a model that knows nothing yet."""
        if not self.inner.rates_paths:
            return CostModel(self.inner.sizes)
        if not (probes := self.inner.probes_of)(0):
            return PruningModel(half_lengths(self.max_nodes - 1))
        largest = max(size for size in range(self.max_nodes) if size + probes(size) < self.max_nodes)
        sizes = (*half_lengths(largest), 0)
        return PruningModel(sizes, [probes(size) for size in sizes])

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        self.inner.admit(requests, sampler, stopping)


def half_lengths(length: int) -> tuple[int, ...]:
    """Sizes of a chain: all of it, half of it, a quarter of it, and so on."""
    return (length, *half_lengths(-(-length // 2))) if length > 1 else (1,)
