"""The speculative loop: propose, score, verify, commit.

It knows no method and no model by name. Plain decoding is the drafter that proposes nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from time import perf_counter

import torch

from mmspec.decoding.draft import Draft, DraftKind
from mmspec.decoding.interfaces import AcceptanceRule, Drafter, Request, State, Target, list_prompts
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
from mmspec.decoding.sequences import Emission, Sequences
from mmspec.decoding.verdict import Verdict

# A generous max_new_tokens must not cost memory that is never used: beyond this the cache grows in blocks.
PREALLOCATED_TOKENS = 2048


@torch.inference_mode()
def speculate(
    target: Target[State],
    drafter: Drafter,
    rule: AcceptanceRule,
    sampler: Sampler,
    requests: Sequence[Request],
    sequences: Sequences,
    random: RandomStream,
) -> Iterator[Emission]:
    """Decode a batch of requests, yielding the tokens of every round.

    Args:
        target: the model whose distribution is promised.
        drafter: proposes the drafts.
        rule: verifies them; it must be sound for the drafter's kind of draft.
        sampler: logits to distribution, for target and drafter alike.
        requests: B prompts.
        sequences: B rows that hold the prompts; it grows, and says when all rows are finished.
        random: the rows' random numbers.

    Yields:
        One Emission for the prefill, then one a round.
    """
    if not requests or sequences.stopping.max_new_tokens == 0:
        return
    stats, started = sequences.stats, perf_counter()
    ahead = min(sequences.stopping.max_new_tokens, PREALLOCATED_TOKENS) + drafter.max_nodes
    capacity = max(map(len, sequences.tokens)) + ahead

    state, prefill = target.prefill(list_prompts(requests, sampler), capacity, drafter.taps)
    session = drafter.start(requests, prefill, sampler, random)
    nothing = Draft.chain(sequences.root[:, None], DraftKind.POINT)
    scores = sampler(prefill.logits, nothing, sequences.tokens)
    choice = scores.choose(nothing, random, sequences.emitted)
    verdict = Verdict.at(nothing, torch.zeros_like(sequences.root), choice[:, 0])
    emission = sequences.append(nothing, verdict, scores.are_finite())
    stats.target_forwards += 1
    stats.cached_prompt_tokens = prefill.cached_tokens
    stats.prefill_seconds = perf_counter() - started
    yield emission

    while not sequences.finished:
        clock = perf_counter()
        draft = session.propose(sequences.root, sequences.emitted, sequences.tokens)
        drafted = perf_counter()
        output = target.score(state, draft, drafter.taps)
        stats.draft_seconds += drafted - clock
        stats.target_seconds += perf_counter() - drafted
        stats.draft_passes = session.passes
        scores = sampler(output.logits, draft, sequences.tokens)
        verdict = rule.verify(draft, scores, random, sequences.emitted)
        target.commit(state, draft, verdict, sequences.active)
        session.observe(draft, output, scores, verdict)
        emission = sequences.append(draft, verdict, scores.are_finite())
        state.tighten(sequences.output_lengths)
        stats.target_forwards += 1
        stats.cache_bytes = state.nbytes()
        yield emission
