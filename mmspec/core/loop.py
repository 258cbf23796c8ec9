"""The speculative loop: propose, score, verify, commit.

The loop is independent of methods and models. Plain decoding is a drafter that proposes no tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, closing
from dataclasses import dataclass
from time import perf_counter
from typing import Generic, NamedTuple, Self

import torch
from torch import Tensor

from mmspec.core.cache import round_up
from mmspec.core.canvas import Canvas, Emission
from mmspec.core.chunked_prefill import ChunkedPrefill, finish
from mmspec.core.decoder import Decoder
from mmspec.core.distributions import AnyDistribution
from mmspec.core.draft import Draft
from mmspec.core.grammar import MOST_CERTAIN, with_certain
from mmspec.core.interfaces import (
    DraftSession,
    PromptOutput,
    Request,
    Round,
    State,
    Target,
    list_prompts,
)
from mmspec.core.logprobs import pack
from mmspec.core.random_stream import RandomStream
from mmspec.core.round_graphs import RoundGraphs, Steady
from mmspec.core.rows import Rows, named
from mmspec.core.sampling import AnySampler, RowSettings
from mmspec.core.statistics import Timer
from mmspec.core.verdict import Measured, Path, Verdict

# A large max_new_tokens must not allocate memory that is never used: caches begin with a multiple of this.
PREALLOCATED_TOKENS = 2048


class Computed(NamedTuple):
    """A computed round.

    Attributes:
        draft, first, scores, verdict: see `Round`.
        report: [B, columns] for the host; see `Canvas.write`.
        measured: name of the rule's measurement.
    """

    draft: Draft
    first: Tensor
    scores: AnyDistribution
    verdict: Verdict
    report: Tensor
    measured: str


@dataclass
class RoundCounter(Rows):
    """Number of rounds so far, [B, 1] on the device: a graph cannot read a number of the host."""

    row_fields = named("value")

    value: Tensor

    def next(self) -> Tensor:
        """Return the index of this round, [B, 1], and count it."""
        now, self.value = self.value, self.value + 1
        return now


@dataclass
class Prefilled(Rows):
    """Logits [B, 1, V] after the prompts, [2B, 1, V] under guidance."""

    row_fields = named("logits")

    logits: Tensor


@dataclass
class Batch(Rows, Generic[State]):
    """Requests that are decoded together, with their state between rounds.

    Attributes:
        target: the model that scores drafts and defines the output distribution.
        decoder: the drafter and the acceptance rule.
        sampler: converts logits to a distribution, for target and drafter alike.
        canvas: the output of the B rows, and which rows are finished.
        random: the rows' random numbers.
        state: the target's state, such as its KV cache.
        session: the drafter's state.
        round: number of forward passes so far.
        computing: context in which the models run; see `Target.computing`.
        graphs: CUDA graphs of whole rounds; None to launch each operation.
        counter: the round on the device, for rounds in graphs.
    """

    row_fields = named("sampler", "canvas", "random", "state", "session", "counter")

    target: Target[State]
    decoder: Decoder
    sampler: RowSettings
    canvas: Canvas
    random: RandomStream
    state: State
    session: DraftSession
    timer: Timer
    round: int
    computing: Callable[[], AbstractContextManager[None]]
    graphs: RoundGraphs | None = None
    counter: RoundCounter | None = None

    def part(self, rows: Sequence[int], count: int | None = None) -> Self:
        """Return a batch of the given rows. Call it between rounds."""
        return super().part(rows, len(self.canvas.ids))

    def joined(self, other: Self, counts: tuple[int, int] | None = None) -> Self:
        """Return these rows followed by the rows of `other`. Call it between rounds of both batches."""
        return super().joined(other, (len(self.canvas.ids), len(other.canvas.ids)))

    def overwritten(self, slots: Sequence[int], other: Self, counts: tuple[int, int] | None = None) -> Self:
        """Return these rows, with those of `other` in place of some. Call it between rounds of both batches.

        Args:
            slots: indices of the rows that are replaced.
            other: a batch that uses graphs if this one does.
        """
        return super().overwritten(slots, other, (len(self.canvas.ids), len(other.canvas.ids)))

    def rows_changed(self) -> None:
        if self.counter is not None and not self.sampler.processors:
            self.canvas.forget_prompts()
        self.timer = Timer(self.canvas.stats, self.target.device)
        self.session.attach(self.state)

    def decode_round(self) -> Computed:
        """Run one round: propose, score, verify, commit. The report is copied to the host asynchronously."""
        timer = self.timer
        timer.start()
        with self.computing():
            self.session.begin_round(self.canvas)
            if self.graphs is None:
                made = self.compute(timer.end)
            else:
                self.canvas.reserve(max(self.canvas.length_bounds) + self.decoder.max_nodes)
                fixed = self.target, self.decoder.drafter, self.decoder.rule
                made = self.graphs.run(self.parts, fixed, self.decoder.max_nodes, self.compute)
                timer.end("target")
        self.session.end_round(made.draft, is_usual=self.graphs is None or self.graphs.is_settled)
        self.round += 1
        self.canvas.stats.draft_passes = self.session.passes
        self.canvas.send(made.report, made.draft.reach, made.measured)
        return made

    def compute(self, end: Callable[[str], None] = lambda part: None) -> Computed:
        """Compute a round on the device; `end` is called after each part, "draft", "target" and "verify"."""
        canvas = self.canvas
        draft = self.session.propose(canvas)
        if self.decoder.takes_candidates and self.sampler.grammars:
            draft = with_certain(draft, self.sampler.grammars, canvas, self.target.vocabulary)
        draft = draft.roots_alone(canvas.in_step) if canvas.in_step else draft
        end("draft")
        output = self.target.score(self.state, draft)
        end("target")
        first = draft.first(canvas.emitted)
        scores = self.sampler(output.logits, draft, canvas.history, first)
        round = self.round if self.counter is None else self.counter.next()
        noise = self.random.repeat(len(first)).during(round)
        verdict, measured = self.decoder.decide(draft, output, scores, noise, first)
        self.target.commit(self.state, draft, verdict, canvas.active)
        end("verify")
        self.session.observe(draft, output, scores, verdict)
        end("draft")
        canvas.reserve(max(canvas.length_bounds) + draft.reach)
        more = logprob_columns(canvas, self.sampler, output.logits, verdict)
        report = canvas.write(draft, verdict, measured, *more)
        return Computed(draft, first, scores, verdict, report, measured.name)

    def tighten(self) -> None:
        """Lower the upper bounds of lengths in caches to what the host knows."""
        bounds = self.canvas.length_bounds
        self.state.tighten(bounds)
        self.session.tighten(bounds)

    def prefill_draft(self) -> ChunkedPrefill[None]:
        """Run the drafter's own prefill now, with a pause before each forward pass."""
        with closing(self.session.deferred_prefill()) as prefill:
            while True:
                with self.computing():
                    tokens = next(prefill, None)
                if tokens is None:
                    return
                yield tokens

    def use_few_sizes(self) -> None:
        """Prepare the state for graphs, of which each kind and size of state has its own."""
        use_few_sizes(self.canvas, self.decoder, self.sampler)
        with self.computing():
            self.session.use_few_sizes()
        rows = len(self.canvas.ids)
        self.counter = RoundCounter(torch.full((rows, 1), self.round, device=self.target.device))

    def reserve(self, places: int) -> None:
        """Allocate caches and output for rows of this number of tokens, a power of two."""
        for cache in Steady(self.parts).caches:
            cache.reserve(places - cache.longest)
        self.canvas.reserve(places - 1)

    def snapshot(self) -> Snapshot:
        """Store the state between rounds, to compute the next round again if memory runs out."""
        return Snapshot(self.parts if runs_by_itself(self.target.device) else ())

    @property
    def parts(self) -> list[Rows]:
        """The state between rounds."""
        parts = [getattr(self, each.name) for each in self._fields()]
        return [each for each in parts if each is not None]

    def read_round(self) -> Emission:
        """Read the report of the oldest unread round, and update the statistics."""
        emission = self.canvas.read()
        self.canvas.stats.target_forwards += 1
        self.canvas.stats.cache_bytes = self.state.nbytes()
        self.session.learn(self.canvas, emission)
        return emission


class Snapshot:
    """The attributes of the state between rounds; tensors are not copied.

    Args:
        parts: the state; empty to store nothing, where no memory of a device can run out.
    """

    def __init__(self, parts: Sequence[Rows]) -> None:
        steady = Steady(parts)
        self._objects, self._caches = steady.objects, steady.caches
        self._values = [dict(vars(each)) for each in steady.objects]
        self._rearranged = [cache.rearranged for cache in steady.caches]

    def restore(self) -> bool:
        """Restore the attributes; False if the round has changed what they refer to, such as keys."""
        changed = [cache.rearranged for cache in self._caches] != self._rearranged
        if changed or not self._objects:
            return False
        for each, values in zip(self._objects, self._values, strict=True):
            vars(each).clear()
            vars(each).update(values)
        return True


@torch.inference_mode()
def prefill_requests(
    target: Target[State],
    decoder: Decoder,
    sampler: RowSettings,
    requests: Sequence[Request],
    canvas: Canvas,
    is_copied: bool = False,
) -> ChunkedPrefill[tuple[State, PromptOutput]]:
    """Prefill a batch of requests, with pauses; see `Target.chunked_prefill`.

    The other arguments are those of `speculate`.

    Returns:
        The state and the prefill, as `begin` takes them.
    """
    stats = canvas.stats
    most = max(stopping.max_new_tokens for stopping in canvas.stopping)
    nodes = decoder.max_nodes + (MOST_CERTAIN if sampler.grammars else 0)
    longest = max(map(len, canvas.ids))
    capacity = min(longest + most + nodes, round_up(longest + 2 * nodes, PREALLOCATED_TOKENS))
    capacity = longest + nodes if is_copied else capacity
    computing = target.computing(*decoder.modules)
    prompts = list_prompts(requests, sampler)
    with closing(target.chunked_prefill(prompts, capacity, decoder.taps, is_copied)) as prefill:
        while True:
            started, timer = perf_counter(), Timer(stats, target.device)
            with computing(), timer:
                try:
                    tokens = next(prefill)
                except StopIteration as end:
                    result: tuple[State, PromptOutput] = end.value
                    return result
                finally:
                    timer.end("prompt")
                    stats.prefill_seconds += perf_counter() - started
            yield tokens


@torch.inference_mode()
def begin(
    target: Target[State],
    decoder: Decoder,
    sampler: RowSettings,
    requests: Sequence[Request],
    canvas: Canvas,
    random: RandomStream,
    prefilled: tuple[State, PromptOutput] | None = None,
    graphs: RoundGraphs | None = None,
) -> tuple[Batch[State], Round]:
    """Choose the first token of each request of a batch. The other arguments are those of `speculate`.

    Args:
        prefilled: the result of `prefill_requests`; None to prefill the prompts now.
        graphs: CUDA graphs, by which the first tokens may be chosen; the tensors of the batch are then valid
            until the next batch begins, and have to be copied. None to launch each operation.

    Returns:
        The batch, whose state the caller closes, and the round of the prefill.
    """
    if prefilled is None:
        decoder.admit(requests, sampler, canvas.stopping[0])
        prefilled = finish(prefill_requests(target, decoder, sampler, requests, canvas))
    (state, prefill), stats = prefilled, canvas.stats
    started, timer = perf_counter(), Timer(stats, target.device)
    timer.start()
    computing = target.computing(*decoder.modules)
    try:
        with computing():
            session = decoder.start(requests, prefill, sampler, random)
            session.attach(state)
            timer.end("draft")
            ends = Prefilled(prefill.logits)

            def choose() -> Computed:
                return choose_first(ends.logits, session, sampler, canvas, random)

            if graphs is not None:
                use_few_sizes(canvas, decoder, sampler)
            if graphs is None or sampler.processors or type(session).open is not DraftSession.open:
                made = choose()
            else:
                made = graphs.run([ends, canvas, random, sampler], [], 0, choose)
        timer.end("verify")
        canvas.send(made.report, made.draft.reach, made.measured)
        emission = canvas.read()
    except BaseException:
        state.close()
        raise
    stats.prompt_forwards = prefill.forwards
    stats.target_forwards += prefill.forwards
    stats.cached_prompt_tokens = prefill.cached_tokens
    stats.prefill_seconds += perf_counter() - started
    where = canvas, random, state, session, timer, prefill.forwards, computing
    batch = Batch(target, decoder, sampler, *where)
    return batch, Round(*made[:4], emission)


def choose_first(
    logits: Tensor, session: DraftSession, sampler: RowSettings, canvas: Canvas, random: RandomStream
) -> Computed:
    """Choose the first token of each row.

    Args:
        logits: [B, 1, V] after the prompts; see `PromptOutput`.
        session: of the drafter.
        sampler, canvas, random: see `speculate`.
    """
    draft = session.open(canvas)
    first = draft.first(canvas.emitted)
    scores = sampler(logits, draft, canvas.history, first)
    lanes, noise = draft.lanes, random.repeat(len(first))
    path = Path.root(lanes, scores.choose(lanes, noise, first)[:, 0])
    verdict = draft.verdict(path, scores.is_finite())
    canvas.reserve(max(canvas.length_bounds) + draft.reach)
    more = logprob_columns(canvas, sampler, logits, verdict)
    measured = Measured.nothing(canvas.active)
    report = canvas.write(draft, verdict, measured, *more)
    return Computed(draft, first, scores, verdict, report, measured.name)


def use_few_sizes(canvas: Canvas, decoder: Decoder, sampler: RowSettings) -> None:
    """Pad the tensors of a canvas to few sizes; see `Canvas.use_few_sizes`."""
    most = max(stopping.max_new_tokens for stopping in canvas.stopping)
    places = min(most + decoder.max_nodes, PREALLOCATED_TOKENS)
    canvas.use_few_sizes(places, reads_prompts=bool(sampler.processors))


@torch.inference_mode()
def speculate(
    target: Target[State],
    decoder: Decoder,
    sampler: RowSettings,
    requests: Sequence[Request],
    canvas: Canvas,
    random: RandomStream,
    is_watched: bool = False,
) -> Iterator[Round]:
    """Decode a batch of requests, round by round.

    Args:
        target: the model that scores drafts and defines the output distribution.
        decoder: proposes drafts, and decides which draft tokens are accepted.
        sampler: converts logits to a distribution, for target and drafter alike.
        requests: B prompts.
        canvas: B rows that hold the prompts. The loop fills it, and ends when all its rows are finished.
        random: the rows' random numbers.
        is_watched: whether the caller reads the tensors of the rounds. Otherwise rounds may be replayed from
            graphs, which overwrite them.

    Yields:
        One Round for the prefill, then one for each scoring forward pass; valid until the next one. On a GPU
        the next round may already be running then, and one extra round, which is never read, follows the
        last.
    """
    if not requests or not any(stopping.max_new_tokens for stopping in canvas.stopping):
        return
    # A GPU starts the next round while the host reads this one, unless the next depends on the host.
    criteria = any(stopping.criteria or stopping.of_output for stopping in canvas.stopping)
    decides = criteria or canvas.in_step or sampler.reads_ids or not decoder.runs_ahead
    late = 1 if runs_by_itself(target.device) and not decides else 0
    graphs = target.graphs if late and not is_watched else None
    if graphs is not None:
        sampler = sampler.on_device(len(requests), target.device)
    batch, prompts = begin(target, decoder, sampler, requests, canvas, random)
    with closing(batch.state), batch.timer:
        yield prompts
        if graphs is not None:
            batch.use_few_sizes()
            batch.graphs = graphs
        rounds: deque[Computed] = deque()
        while not canvas.finished:
            rounds.append(batch.decode_round())
            emission = batch.read_round() if canvas.unread > late else None
            batch.tighten()
            if emission is not None:
                yield Round(*rounds.popleft()[:4], emission)
        target.remember(batch.state, canvas.outputs(), canvas.without_errors)


def logprob_columns(canvas: Canvas, sampler: AnySampler, logits: Tensor, verdict: Verdict) -> list[Tensor]:
    """Return the columns of log-probabilities for the report of a round, if a row asks for them.

    Args:
        canvas: of the batch.
        sampler: of the batch.
        logits: the target's, at the nodes of the draft.
        verdict: a path. The pipeline refuses log-probabilities for models that fill places.
    """
    count = canvas.most_logprobs
    if count is None or not isinstance(verdict, Path):
        return []
    return [pack(sampler.guided(logits), verdict.nodes, verdict.values, count)]


def runs_by_itself(device: torch.device) -> bool:
    """Return whether a device runs submitted work asynchronously from the host."""
    return device.type == "cuda"
