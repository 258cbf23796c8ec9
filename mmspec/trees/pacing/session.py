"""Drafter whose draft sizes are chosen by a policy, and its sessions."""

from __future__ import annotations

from abc import abstractmethod
from collections import deque
from collections.abc import Callable, Generator, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Generic, Self, TypeVar, cast

import torch
from torch import nn

from mmspec.core.canvas import Canvas, Emission, Stopping
from mmspec.core.chunked_prefill import ChunkedPrefill
from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import Draft, Tree
from mmspec.core.graphs import power_of_two
from mmspec.core.interfaces import (
    Drafter,
    DraftSession,
    PromptOutput,
    Request,
    TargetOutput,
    TargetState,
)
from mmspec.core.loop import runs_by_itself
from mmspec.core.random_stream import RandomStream
from mmspec.core.rows import Rows, named
from mmspec.core.sampling import AnySampler, Sampler
from mmspec.core.session import PromptBatch
from mmspec.core.verdict import Path
from mmspec.trees.pacing.candidates import Candidate
from mmspec.trees.pacing.config import DEFAULT_PACING, PacingConfig
from mmspec.trees.pacing.costs import PLAIN
from mmspec.trees.pacing.pruning import PruningPolicy
from mmspec.trees.pacing.sizes import SizePolicy, half_lengths
from mmspec.trees.pacing.times import DeviceTimes, HostTimes, RoundTimes

PacingPolicy = SizePolicy | PruningPolicy
Policy = TypeVar("Policy", bound=PacingPolicy)
CPU = torch.device("cpu")
#: A head that rests in graphs reads at least so many tokens at a time: it takes as long to read one.
LEAST_ROOM = 8


class PacedSession(DraftSession, Generic[Policy]):
    """Wraps another drafter's session, and reports the time and tokens of each round to a policy.

    On a CPU, a round lasts until the host has read its tokens; on a GPU, until they are sent. Prefills belong
    to no round: they take the same time for every draft size. A round to which grammars have added certain
    tokens costs more, and gives more, than its choice: it counts only until the choice is measured.

    Args:
        drafter: the drafter of the session.
        batch: the prefilled batch.

    Attributes:
        inner: the wrapped session.
        may_vary: of each row, whether its output does not depend on the size of its drafts. Drafts are whole
            while it does for any row.
        policy: of the current number of rows; it outlives the session.
        times: of rounds.
        choice: of the current round; None in a round that does not count, such as one with a whole draft.
        nodes: n of the current draft, without certain tokens.
    """

    row_fields = named("inner", "may_vary")
    scratch = DraftSession.scratch | {"policy", "times", "choice", "nodes", "_choices"}

    policy: Policy

    def __init__(self, drafter: PacedDrafter, batch: PromptBatch) -> None:
        device = batch.prefill.logits.device
        self.drafter = drafter
        self.inner = drafter.inner.start(batch.requests, batch.prefill, batch.sampler, batch.random)
        self.may_vary = [drafter.may_vary(batch.sampler)] * len(batch.requests)
        self.times: RoundTimes = DeviceTimes(device) if runs_by_itself(device) else HostTimes(drafter.clock)
        self.choice: int | None = None
        self.nodes = 0
        self._choices: deque[int | None] = deque()  # of the rounds that the host has not read
        self._nothing = batch.prefill.logits.new_zeros(1, 0, batch.prefill.logits.shape[-1])

    def begin_round(self, canvas: Canvas) -> None:
        self._decide(canvas)
        self.times.begin()

    def propose(self, canvas: Canvas) -> Draft:
        draft = self._draft(canvas)
        self.nodes = draft.valid.shape[1]
        return draft

    def end_round(self, draft: Draft, is_usual: bool) -> None:
        self.times.end()
        self.passes = self.inner.passes
        self._choices.append(self.choice if is_usual else None)

    def learn(self, canvas: Canvas, emission: Emission) -> None:
        choice, seconds = self._choices.popleft(), self.times.read()
        if choice is not None:
            self._record(canvas, choice, list(map(len, emission.tokens)), seconds)

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        return Rows.part(self, rows, count)  # the wrapped session knows whether to prepare

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        return Rows.joined(self, other, counts)

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        return Rows.overwritten(self, slots, other, counts)

    @abstractmethod
    def _decide(self, canvas: Canvas) -> None:
        """Decide on the host whether this round has a draft; prompts are read before the first one."""

    @abstractmethod
    def _draft(self, canvas: Canvas) -> Draft:
        """Draft as decided."""

    @abstractmethod
    def _record(self, canvas: Canvas, choice: int, grown: Sequence[int], seconds: float) -> None:
        """Record a round: its choice, the tokens of each of the B rows, and its time."""

    def _policy_for(self, canvas: Canvas) -> Policy:
        return cast(Policy, self.drafter.policy_for(len(canvas.ids), canvas.device))

    def _plain(self, canvas: Canvas) -> Tree:
        """Return the draft of a plain round: the root alone."""
        kind, rows = self.drafter.kind, len(canvas.ids)
        no_q = Categorical(self._nothing.expand(rows, -1, -1)) if kind.is_drawn else None
        return Tree.chain(canvas.root[:, None], kind, no_q)

    def deferred_prefill(self) -> ChunkedPrefill[None]:
        yield from self.inner.deferred_prefill()

    def attach(self, state: TargetState) -> None:
        self.inner.attach(state)

    def tighten(self, emitted: Sequence[int]) -> None:
        self.inner.tighten(emitted)

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        self.inner.observe(draft, output, scores, verdict)
        is_longer = draft.valid.shape[1] > self.nodes  # only in rounds without a graph
        if is_longer and self.choice is not None and self.policy.cost.is_measured(self.choice):
            self.choice = None


class SizedSession(PacedSession[SizePolicy]):
    """Session that sets the size of every draft before the round, and so without its probabilities.

    Each size has a graph. So has a round without a draft, in which a session of a limited `room` reads
    nothing, and one in which it drafts to read what was committed, and the draft is dropped: a head that
    rests can draft again at any time, and reads no more than `room` tokens then.

    Attributes:
        drafts: whether this round has a draft.
        reads: whether the wrapped session drafts.
        held: upper bound of the tokens that were committed since it last read.
    """

    scratch = PacedSession.scratch | {"held"}

    def __init__(self, drafter: PacedDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self.drafts, self.reads = False, False
        self.held = 1  # the first token

    def use_few_sizes(self, room: int = 0) -> None:
        inner = self.drafter.inner
        deepest = max(inner.sizes, default=inner.max_nodes - 1)
        self.inner.use_few_sizes(max(min(LEAST_ROOM, inner.max_nodes), deepest + 1))

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        self.held = max(self.held, other.held)
        return super().joined(other, counts)

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        self.held = max(self.held, other.held)
        return super().overwritten(slots, other, counts)

    def _decide(self, canvas: Canvas) -> None:
        choice, reads = 1, False  # the whole draft
        self.choice = None
        if self.drafter.rehearsed is not None:
            choice, reads = self.drafter.rehearsed
        elif all(self.may_vary):
            self.policy = self._policy_for(canvas)
            self.choice = choice = self.policy.choose()
        self.drafts = choice != PLAIN
        self.reads = self.drafts or reads or 0 < self.inner.room <= self.held
        if sizes := self.drafter.inner.sizes:  # the smallest for a draft that is dropped
            self.inner.resize((choice - 1) % len(sizes))
        if self.reads:
            self.prepare()

    def _draft(self, canvas: Canvas) -> Draft:
        draft = self.inner.propose(canvas) if self.reads else None
        return draft if draft is not None and self.drafts else self._plain(canvas)

    def end_round(self, draft: Draft, is_usual: bool) -> None:
        super().end_round(draft, is_usual)
        self.held = (0 if self.reads else self.held) + draft.reach

    def _record(self, canvas: Canvas, choice: int, grown: Sequence[int], seconds: float) -> None:
        self.policy.record(choice, [count for count in grown if count], seconds)


class PrunedSession(PacedSession[PruningPolicy]):
    """Session that prunes every draft on the host, which reads its probabilities: for CPUs.

    Attributes:
        rests: whether this round is plain.
        drafting: seconds of the current round that drafting took.
        levels: number of levels that the drafter's own model drafted in this round.
        candidates: of each row in this round, before pruning.
    """

    def __init__(self, drafter: PacedDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self._forget()

    def _forget(self) -> None:
        """Reset the data of the current round."""
        self.rests, self.drafting, self.levels = False, 0.0, 0
        self.candidates: list[list[Candidate]] = []

    def _decide(self, canvas: Canvas) -> None:
        self._forget()
        self.policy = self._policy_for(canvas)
        self.rests = all(self.may_vary) and self.policy.rests()
        if not self.rests:
            self.prepare()

    def _draft(self, canvas: Canvas) -> Draft:
        self.choice = PLAIN if self.rests else None
        if self.rests:
            return self._plain(canvas)
        if not all(self.may_vary):
            self.inner.limit(self.drafter.max_nodes, lambda depth: [])
            return self.inner.propose(canvas)
        policy, before = self.policy, self.inner.passes
        self.inner.limit(policy.limit, policy.least)
        draft = cast(Tree, self.inner.propose(canvas))  # drafters that rate paths propose trees
        self.levels = draft.max_depth if self.inner.passes > before else 0
        self.candidates = policy.calibrate.rate(draft, self.inner.likelihoods)
        rows = zip(self.candidates, canvas.finish_reasons, strict=True)
        unfinished = [row for row, ended in rows if ended is None]
        sums = [list(accumulate((each.path for each in row), initial=1.0)) for row in unfinished]
        self.choice = policy.choose(sums)
        kept = [[each.node for each in row[: policy.nodes[self.choice]]] for row in self.candidates]
        most = max(map(len, kept))
        if most + 1 < draft.tokens.shape[1]:
            draft = draft.part_of(kept, most)
        self.drafting = self.times.read()
        return draft

    def _record(self, canvas: Canvas, choice: int, grown: Sequence[int], seconds: float) -> None:
        tokens = [count for count in grown if count]
        self.policy.record(choice, tokens, seconds, self.drafting, self.levels)
        for row, candidates in enumerate(self.candidates):
            if count := grown[row]:
                self.policy.calibrate.learn(candidates, canvas.ids[row][-count:])


class PacedDrafter(Drafter):
    """Wraps a drafter, with a policy for each batch size that chooses the draft sizes.

    On a CPU, drafts of a drafter that rates paths are pruned by their probabilities, which the host reads. On
    a GPU that read would be a second synchronisation in a round, and no graph could hold a whole round: there
    the size is chosen before the round, by what the host has read so far.

    Args:
        inner: the wrapped drafter.
        policies: by batch size (`size_class`); they outlive the calls, and new ones are added.
        clock: returns seconds.
        config: constants of new policies.
        may_vary: whether the output of rows with these settings does not depend on the size of drafts.

    Attributes:
        rehearsed: choice of all rounds, and whether a session reads in one without a draft; None to choose.
    """

    def __init__(
        self,
        inner: Drafter,
        policies: dict[int, PacingPolicy],
        clock: Callable[[], float] = perf_counter,
        config: PacingConfig = DEFAULT_PACING,
        may_vary: Callable[[AnySampler], bool] = lambda sampler: True,
    ) -> None:
        self.inner, self.policies, self.clock, self.config = inner, policies, clock, config
        self.may_vary = may_vary
        self.rehearsed: tuple[int, bool] | None = None
        self.kind, self.max_nodes, self.runs_ahead = inner.kind, inner.max_nodes, inner.runs_ahead
        self.taps, self.branches, self.draws_anew = inner.taps, inner.branches, inner.draws_anew
        self.exactness, self.keeps, self.shares_tree = inner.exactness, inner.keeps, inner.shares_tree

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self.inner.modules

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: AnySampler, random: RandomStream
    ) -> DraftSession:
        batch = PromptBatch(requests, prefill, sampler, random)
        prunes = self._prunes(prefill.logits.device)
        return PrunedSession(self, batch) if prunes else SizedSession(self, batch)

    def _prunes(self, device: torch.device) -> bool:
        return self.inner.rates_paths and not runs_by_itself(device)

    def policy_for(self, rows: int, device: torch.device = CPU) -> PacingPolicy:
        """Return the policy of batches of about this size; a new one continues from that of the nearest.

        A trial in a wide batch is expensive, and is postponed where it is expected to lose.
        """
        size = size_class(rows)
        if size not in self.policies:
            # the nearest, and of two the narrower one, whose pauses are taken over
            nearest = min(
                self.policies, key=lambda known: (max(known / size, size / known), known), default=None
            )
            policy = self.policies.setdefault(size, self.new_policy(size, device))
            if nearest is not None:
                policy.continue_from(self.policies[nearest])  # type: ignore[arg-type]  # of the same drafter
            policy.rest_unless_promising()
        return self.policies[size]

    def new_policy(self, rows: int, device: torch.device = CPU) -> PacingPolicy:
        """Create a policy without measurements."""
        if not self._prunes(device):
            config = self.config.for_gpus() if runs_by_itself(device) else self.config
            whole = (self.inner.max_nodes - 1,)
            depths, nodes = self.inner.sizes or whole, self.inner.candidates_of_sizes or whole
            return SizePolicy(depths, config, rows, nodes)
        queries = self.inner.queries_of
        if not queries(0):
            return PruningPolicy(half_lengths(self.max_nodes - 1), config=self.config, rows=rows)
        largest = max(size for size in range(self.max_nodes) if size + queries(size) < self.max_nodes)
        sizes = (*half_lengths(largest), 0)
        return PruningPolicy(sizes, [queries(size) for size in sizes], self.config, rows)

    def rehearse(self, device: torch.device) -> Generator[None, None, None]:
        """Yield for each size, and for rounds without a draft in which a session reads nothing, and reads."""
        if not runs_by_itself(device):
            yield
            return
        kinds = [(PLAIN, False), (PLAIN, True)]
        kinds += [(1 + size, True) for size in range(max(1, len(self.inner.sizes)))]
        try:
            for self.rehearsed in kinds:
                yield
        finally:
            self.rehearsed = None

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        self.inner.admit(requests, sampler, stopping)


def size_class(rows: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `rows`.

    Rounds of a class take similar times.
    """
    power = power_of_two(rows)
    return 3 * power // 4 if rows <= 3 * power // 4 else power
