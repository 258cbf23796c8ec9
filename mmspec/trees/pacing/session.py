"""Drafter whose draft sizes are chosen by a policy, and its sessions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Generic, Self, TypeVar, cast

from torch import nn

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.chunked_prefill import ChunkedPrefill
from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import Draft, Tree
from mmspec.core.graphs import can_capture, power_of_two
from mmspec.core.interfaces import (
    Drafter,
    DraftSession,
    PromptOutput,
    Request,
    TargetOutput,
    TargetState,
)
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

PacingPolicy = SizePolicy | PruningPolicy
Policy = TypeVar("Policy", bound=PacingPolicy)


class PacedSession(DraftSession, Generic[Policy]):
    """Wraps another drafter's session, and reports the time and tokens of each round to a policy.

    A round lasts from `propose` until the host has read its tokens. Prefills belong to no round: they take
    the same time for every draft size. A round to which grammars have added certain tokens costs more, and
    gives more, than its choice: it counts only until the choice is measured.

    Args:
        drafter: the drafter of the session.
        batch: the prefilled batch.

    Attributes:
        inner: the wrapped session.
        may_vary: of each row, whether its output does not depend on the size of its drafts. Drafts are whole
            while it does for any row.
        policy: of the current number of rows; it outlives the session.
        choice: of the current round; None between rounds, and in a round with a whole draft.
        started: start of the current round, in seconds.
        lengths: of the outputs at that time, in tokens.
        nodes: n of the current draft, without certain tokens.
    """

    row_fields = named("inner", "may_vary")

    policy: Policy

    def __init__(self, drafter: PacedDrafter, batch: PromptBatch) -> None:
        self.drafter = drafter
        self.inner = drafter.inner.start(batch.requests, batch.prefill, batch.sampler, batch.random)
        self.may_vary = [drafter.may_vary(batch.sampler)] * len(batch.requests)
        self.choice: int | None = None
        self.started = 0.0
        self.lengths: list[int] = []
        self.nodes = 0
        self._nothing = batch.prefill.logits.new_zeros(1, 0, batch.prefill.logits.shape[-1])

    def propose(self, canvas: Canvas) -> Draft:
        self.started, self.lengths = self.drafter.clock(), list(canvas.output_lengths)
        if all(self.may_vary):
            self.policy = cast(Policy, self.drafter.policy_for(len(canvas.ids)))
            self.choice, draft = self._draft(canvas)
        else:
            self.choice, draft = None, self._draft_whole(canvas)
        self.passes = self.inner.passes
        self.nodes = draft.valid.shape[1]
        return draft

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        return Rows.part(self, rows, count)  # the wrapped session knows whether to prepare

    def joined(self, other: Self, counts: tuple[int, int]) -> Self:
        return Rows.joined(self, other, counts)

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int]) -> Self:
        return Rows.overwritten(self, slots, other, counts)

    def learn(self, canvas: Canvas) -> None:
        choice, self.choice = self.choice, None
        if choice is not None:
            lengths = zip(canvas.output_lengths, self.lengths, strict=True)
            grown = [new - old for new, old in lengths]
            self._record(canvas, choice, grown, self.drafter.clock() - self.started)

    @abstractmethod
    def _record(self, canvas: Canvas, choice: int, grown: Sequence[int], seconds: float) -> None:
        """Record the last round: its choice, the tokens of each of the B rows, and its time."""

    @abstractmethod
    def _draft(self, canvas: Canvas) -> tuple[int, Draft]:
        """Choose the size of this round's draft, and draft it."""

    @abstractmethod
    def _draft_whole(self, canvas: Canvas) -> Draft:
        """Draft the full size."""

    def _plain(self, canvas: Canvas) -> Tree:
        """Return the draft of a plain round: the root alone."""
        kind, rows = self.drafter.kind, len(canvas.ids)
        no_q = Categorical(self._nothing.expand(rows, -1, -1)) if kind.is_drawn else None
        return Tree.chain(canvas.root[:, None], kind, no_q)

    def deferred_prefill(self) -> ChunkedPrefill[None]:
        yield from self.inner.deferred_prefill()
        self.started = self.drafter.clock()

    def attach(self, state: TargetState) -> None:
        self.inner.attach(state)

    def tighten(self, emitted: Sequence[int]) -> None:
        self.inner.tighten(emitted)

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        self.inner.observe(draft, output, scores, verdict)
        is_longer = draft.valid.shape[1] > self.nodes
        if is_longer and self.choice is not None and self.policy.cost.is_measured(self.choice):
            self.choice = None


class SizedSession(PacedSession[SizePolicy]):
    """Session that sets the size of every draft in advance."""

    def _record(self, canvas: Canvas, choice: int, grown: Sequence[int], seconds: float) -> None:
        self.policy.record(choice, [count for count in grown if count], seconds)

    def _draft(self, canvas: Canvas) -> tuple[int, Draft]:
        choice = self.policy.choose()
        if choice == PLAIN:
            return PLAIN, self._plain(canvas)
        self.prepare()
        self.inner.resize(choice - 1)
        return choice, self.inner.propose(canvas)

    def _draft_whole(self, canvas: Canvas) -> Draft:
        self.inner.resize(0)
        return self.inner.propose(canvas)


class PrunedSession(PacedSession[PruningPolicy]):
    """Session that prunes every draft.

    Attributes:
        drafting: seconds of the current round that drafting took.
        levels: number of levels that the drafter's own model drafted in this round.
        candidates: of each row in this round, before pruning.
    """

    def __init__(self, drafter: PacedDrafter, batch: PromptBatch) -> None:
        super().__init__(drafter, batch)
        self._forget()

    def _forget(self) -> None:
        """Reset the data of the current round."""
        self.drafting, self.levels = 0.0, 0
        self.candidates: list[list[Candidate]] = []

    def _record(self, canvas: Canvas, choice: int, grown: Sequence[int], seconds: float) -> None:
        tokens = [count for count in grown if count]
        self.policy.record(choice, tokens, seconds, self.drafting, self.levels)
        for row, candidates in enumerate(self.candidates):
            if count := grown[row]:
                self.policy.calibrate.learn(candidates, canvas.ids[row][-count:])

    def _draft(self, canvas: Canvas) -> tuple[int, Draft]:
        policy, before = self.policy, self.inner.passes
        self._forget()
        if policy.rests():
            return PLAIN, self._plain(canvas)
        self.prepare()
        self.inner.limit(policy.limit, policy.least)
        draft = cast(Tree, self.inner.propose(canvas))  # drafters that rate paths propose trees
        self.levels = draft.max_depth if self.inner.passes > before else 0
        self.candidates = policy.calibrate.rate(draft, self.inner.likelihoods)
        rows = zip(self.candidates, canvas.finish_reasons, strict=True)
        unfinished = [row for row, ended in rows if ended is None]
        sums = [list(accumulate((each.path for each in row), initial=1.0)) for row in unfinished]
        choice = policy.choose(sums)
        kept = [[each.node for each in row[: policy.nodes[choice]]] for row in self.candidates]
        most = max(map(len, kept))
        if can_capture(canvas.device):  # few sizes, because each is captured in a graph
            most = min(size for size in policy.nodes if size >= most)
        if most + 1 < draft.tokens.shape[1]:
            draft = draft.part_of(kept, most)
        self.drafting = self.drafter.clock() - self.started
        return choice, draft

    def _draft_whole(self, canvas: Canvas) -> Draft:
        self.inner.limit(self.drafter.max_nodes, lambda depth: [])
        return self.inner.propose(canvas)


class PacedDrafter(Drafter):
    """Wraps a drafter, with a policy for each batch size that chooses the draft sizes.

    Args:
        inner: the wrapped drafter.
        policies: by batch size (`size_class`); they outlive the calls, and new ones are added.
        clock: returns seconds.
        config: constants of new policies.
        may_vary: whether the output of rows with these settings does not depend on the size of drafts.
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
        self.kind, self.max_nodes = inner.kind, inner.max_nodes
        self.taps, self.branches, self.draws_anew = inner.taps, inner.branches, inner.draws_anew
        self.exactness, self.keeps, self.shares_tree = inner.exactness, inner.keeps, inner.shares_tree

    @property
    def modules(self) -> Sequence[nn.Module]:
        return self.inner.modules

    def start(
        self, requests: Sequence[Request], prefill: PromptOutput, sampler: AnySampler, random: RandomStream
    ) -> DraftSession:
        batch = PromptBatch(requests, prefill, sampler, random)
        return PrunedSession(self, batch) if self.inner.rates_paths else SizedSession(self, batch)

    def policy_for(self, rows: int) -> PacingPolicy:
        """Return the policy of batches of about this size; a new one continues from that of the nearest.

        A trial in a wide batch is expensive, and is postponed where it is expected to lose.
        """
        size = size_class(rows)
        if size not in self.policies:
            # the nearest, and of two the narrower one, whose pauses are taken over
            nearest = min(
                self.policies, key=lambda known: (max(known / size, size / known), known), default=None
            )
            policy = self.policies.setdefault(size, self.new_policy(size))
            if nearest is not None:
                policy.continue_from(self.policies[nearest])  # type: ignore[arg-type]  # of the same drafter
            policy.rest_unless_promising()
        return self.policies[size]

    def new_policy(self, rows: int) -> PacingPolicy:
        """Create a policy without measurements: a pruning one if the drafter rates paths."""
        if not self.inner.rates_paths:
            return SizePolicy(self.inner.sizes, self.config, rows)
        queries = self.inner.queries_of
        if not queries(0):
            return PruningPolicy(half_lengths(self.max_nodes - 1), config=self.config, rows=rows)
        largest = max(size for size in range(self.max_nodes) if size + queries(size) < self.max_nodes)
        sizes = (*half_lengths(largest), 0)
        return PruningPolicy(sizes, [queries(size) for size in sizes], self.config, rows)

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        self.inner.admit(requests, sampler, stopping)


def size_class(rows: int) -> int:
    """Smallest of 1, 2, 3, 4, 6, 8, 12, 16, 24, ... that is at least `rows`.

    Rounds of a class take similar times.
    """
    power = power_of_two(rows)
    return 3 * power // 4 if rows <= 3 * power // 4 else power
