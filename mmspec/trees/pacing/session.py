"""Drafter whose draft sizes are chosen by a policy, and its sessions."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from itertools import accumulate
from time import perf_counter
from typing import Generic, TypeVar, cast

from torch import nn

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.distributions import Categorical, Scores
from mmspec.core.draft import Draft, Tree
from mmspec.core.graphs import can_capture
from mmspec.core.interfaces import (
    Drafter,
    DraftSession,
    PromptOutput,
    Request,
    TargetOutput,
    TargetState,
)
from mmspec.core.random_stream import RandomStream
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

    A round lasts from one call of `propose` to the next, because the host reads the number of tokens only
    then. The prefill, once per call, belongs to no round: it takes the same time for every draft size.

    Args:
        drafter: the drafter of the session.
        batch: the prefilled batch.
        policy: chooses the sizes; it outlives the session.

    Attributes:
        inner: the wrapped session.
        choice: of the current round; None before the first.
        started: start of the current round, in seconds.
        lengths: of the outputs at that time, in tokens.
    """

    def __init__(self, drafter: PacedDrafter, batch: PromptBatch, policy: Policy) -> None:
        self.drafter = drafter
        self.policy = policy
        self.inner = drafter.inner.start(batch.requests, batch.prefill, batch.sampler, batch.random)
        none = batch.prefill.logits.new_zeros(len(batch.requests), 0, batch.prefill.logits.shape[-1])
        self._no_q = Categorical(none) if drafter.kind.is_drawn else None
        self.choice: int | None = None
        self.started = 0.0
        self.lengths: list[int] = []

    def propose(self, canvas: Canvas) -> Draft:
        now, lengths = self.drafter.clock(), list(canvas.output_lengths)
        if self.choice is not None:
            grown = [new - old for new, old in zip(lengths, self.lengths, strict=True)]
            self._record(canvas, self.choice, grown, now - self.started)
        self.started, self.lengths = now, lengths
        self.choice, draft = self._draft(canvas)
        self.passes = self.inner.passes
        return draft

    @abstractmethod
    def _record(self, canvas: Canvas, choice: int, grown: Sequence[int], seconds: float) -> None:
        """Record the last round: its choice, the tokens of each of the B rows, and its time."""

    @abstractmethod
    def _draft(self, canvas: Canvas) -> tuple[int, Draft]:
        """Choose the size of this round's draft, and draft it."""

    def _plain(self, canvas: Canvas) -> Tree:
        """Return the draft of a plain round: the root alone."""
        return Tree.chain(canvas.root[:, None], self.drafter.kind, self._no_q)

    def prepare(self) -> None:
        self.inner.prepare()
        self.started = self.drafter.clock()

    def attach(self, state: TargetState) -> None:
        self.inner.attach(state)

    def tighten(self, emitted: Sequence[int]) -> None:
        self.inner.tighten(emitted)

    def observe(self, draft: Tree, output: TargetOutput, scores: Scores, verdict: Path) -> None:
        self.inner.observe(draft, output, scores, verdict)


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


class PrunedSession(PacedSession[PruningPolicy]):
    """Session that prunes every draft.

    Attributes:
        drafting: seconds of the current round that drafting took.
        levels: number of levels that the drafter's own model drafted in this round.
        candidates: of each row in this round, before pruning.
    """

    def __init__(self, drafter: PacedDrafter, batch: PromptBatch, policy: PruningPolicy) -> None:
        super().__init__(drafter, batch, policy)
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


class PacedDrafter(Drafter):
    """Wraps a drafter, with a policy for each batch size that chooses the draft sizes.

    Args:
        inner: the wrapped drafter.
        policies: by batch size; they outlive the calls, and new ones are added.
        clock: returns seconds.
        config: constants of new policies.
    """

    def __init__(
        self,
        inner: Drafter,
        policies: dict[int, PacingPolicy],
        clock: Callable[[], float] = perf_counter,
        config: PacingConfig = DEFAULT_PACING,
    ) -> None:
        self.inner, self.policies, self.clock, self.config = inner, policies, clock, config
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
        policy = self.policies.setdefault(len(requests), self.new_policy())
        if isinstance(policy, PruningPolicy):
            return PrunedSession(self, batch, policy)
        return SizedSession(self, batch, policy)

    def new_policy(self) -> PacingPolicy:
        """Create a policy without measurements: a pruning one if the drafter rates paths."""
        if not self.inner.rates_paths:
            return SizePolicy(self.inner.sizes, self.config)
        queries = self.inner.queries_of
        if not queries(0):
            return PruningPolicy(half_lengths(self.max_nodes - 1), config=self.config)
        largest = max(size for size in range(self.max_nodes) if size + queries(size) < self.max_nodes)
        sizes = (*half_lengths(largest), 0)
        return PruningPolicy(sizes, [queries(size) for size in sizes], self.config)

    def admit(self, requests: Sequence[Request], sampler: Sampler, stopping: Stopping) -> None:
        self.inner.admit(requests, sampler, stopping)
