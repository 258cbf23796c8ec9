"""A round from propose to commit is one graph: no part of it depends on values that the host reads."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.core.verdict import Measured, Path
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.rejection import RecursiveRejection, SpeculativeSampling
from tests.contracts.running import as_request
from tests.tiny_models import tiny_llama

PROMPTS = [[1, 2, 3, 4], [5, 6]]


def small() -> CausalTarget:
    return CausalTarget(tiny_llama(layers=1))


CASES: dict[str, Callable[[], tuple[Drafter, AcceptanceRule]]] = {
    "chain": lambda: (DraftModelDrafter(small(), 2, "sampled"), SpeculativeSampling()),
    "tree": lambda: (JacobiDrafter(4, front="3x2", reach=2), RecursiveRejection()),
}


def round_of(drafter: Drafter, rule: AcceptanceRule) -> Callable[[], Tensor]:
    """One round after the prefill, up to the report that the host would read."""
    target, sampler, random = small(), Sampler(0.8), RandomStream.from_seed(0, 2)
    requests = [as_request(prompt) for prompt in PROMPTS]
    canvas = Canvas(PROMPTS, Stopping(64), DecodingStats(), target.device)
    state, prefill = target.prefill([request.inputs for request in requests], 128, drafter.taps)
    session = drafter.start(requests, prefill, sampler, random)
    draft = session.open(canvas)
    first = draft.first(canvas.emitted)
    scores = sampler(prefill.logits, draft, canvas.history, first)
    path = Path.root(draft, scores.choose(draft, random, first)[:, 0])
    canvas.submit(draft, path, Measured.nothing(canvas.active))
    canvas.read()
    canvas.reserve(64)

    def step() -> Tensor:
        draft = session.propose(canvas)
        output = target.score(state, draft)
        first = draft.first(canvas.emitted)
        scores = sampler(output.logits, draft, canvas.history, first)
        verdict, measured = rule.decide(draft, output, scores, random, first)
        target.commit(state, draft, verdict, canvas.active)
        session.observe(draft, output, scores, verdict)
        return canvas.write(draft, verdict, measured)

    return step


@pytest.mark.filterwarnings("ignore:Dynamo detected a call to a `functools.lru_cache`")
@pytest.mark.parametrize("name", CASES)
@pytest.mark.every(2)
def test_a_round_is_traced_without_a_break(name: str) -> None:
    with torch.inference_mode():
        expected = round_of(*CASES[name]())()
        torch._dynamo.reset()
        step = torch.compile(round_of(*CASES[name]()), fullgraph=True, backend="eager")
        assert torch.equal(step(), expected)
