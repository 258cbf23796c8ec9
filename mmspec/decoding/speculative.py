"""The speculative loop: propose, score, verify, commit.

It knows no method and no model by name. Plain decoding is the drafter that proposes nothing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from contextlib import closing
from time import perf_counter
from typing import Any

import torch
from torch import Tensor

from mmspec.decoding.canvas import Canvas
from mmspec.decoding.draft import Draft
from mmspec.decoding.interfaces import AcceptanceRule, Drafter, Request, Round, State, Target, list_prompts
from mmspec.decoding.laps import Laps
from mmspec.decoding.random_stream import RandomStream
from mmspec.decoding.sampling import Sampler
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
    canvas: Canvas,
    random: RandomStream,
) -> Iterator[Round]:
    """Decode a batch of requests, round by round.

    Args:
        target: the model whose distribution is promised.
        drafter: proposes the drafts.
        rule: verifies them; it must be sound for the drafter's kind of draft.
        sampler: logits to distribution, for target and drafter alike.
        requests: B prompts.
        canvas: B rows that hold the prompts; it is filled, and says when all rows are finished.
        random: the rows' random numbers.

    Yields:
        One Round for the prompts, then one for each scoring forward; valid until the next one. On a GPU the
        next round may be on its way by then, and the last is followed by one that nobody reads.
    """
    if not requests or canvas.stopping.max_new_tokens == 0:
        return
    drafter.admit(requests, sampler, canvas.stopping)
    stats, started = canvas.stats, perf_counter()
    ahead = min(canvas.stopping.max_new_tokens, PREALLOCATED_TOKENS) + drafter.max_nodes
    capacity = max(map(len, canvas.ids)) + ahead

    laps = Laps(stats, target.device)
    laps.start()
    state, prefill = target.prefill(list_prompts(requests, sampler), capacity, drafter.taps)
    laps.end("prompt")
    with closing(state), laps:
        session = drafter.start(requests, prefill, sampler, random)
        draft = session.open(canvas)
        laps.end("draft")
        first = draft.first(canvas.emitted)
        scores = sampler(prefill.logits, draft, canvas.ids, first)
        verdict = Verdict.root(draft, scores.choose(draft, random.repeat(len(first)), first)[:, 0])
        laps.end("verify")
        emission = canvas.commit(draft, verdict, scores.is_finite())
        stats.prompt_forwards = prefill.forwards
        stats.target_forwards += prefill.forwards
        stats.cached_prompt_tokens = prefill.cached_tokens
        stats.prefill_seconds = perf_counter() - started
        yield Round(draft, first, scores, verdict, emission)

        # a GPU goes on to the next round while the host reads, where nothing on the host decides about it
        decides = canvas.stopping.criteria or sampler.processors or not drafter.runs_ahead
        late = 1 if runs_by_itself(target.device) and not decides else 0
        rounds: deque[tuple[Draft, Tensor, Any, Verdict]] = deque()
        number = prefill.forwards
        while not canvas.finished:
            laps.start()
            draft = session.propose(canvas)
            laps.end("draft")
            output = target.score(state, draft)
            laps.end("target")
            stats.draft_passes = session.passes
            first = draft.first(canvas.emitted)
            scores = sampler(output.logits, draft, canvas.ids, first)
            noise = random.repeat(len(first)).during(number)
            verdict = rule.verify(draft, scores, noise, first)
            verdict = draft.roll_back(verdict) if rule.rollback else verdict
            target.commit(state, draft, verdict, canvas.active)
            laps.end("verify")
            session.observe(draft, output, scores, verdict)
            laps.end("draft")
            canvas.submit(draft, verdict, scores.is_finite())
            rounds.append((draft, first, scores, verdict))
            number += 1
            completed = canvas.read() if canvas.unread > late else None
            state.tighten(canvas.length_bounds)
            if completed is not None:
                stats.target_forwards += 1
                stats.cache_bytes = state.nbytes()
                yield Round(*rounds.popleft(), completed)


def runs_by_itself(device: torch.device) -> bool:
    """Return whether a device works off what it was told while the host does something else."""
    return device.type == "cuda"
