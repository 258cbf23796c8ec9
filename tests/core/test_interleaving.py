"""Targets and drafters have no state of requests: calls on the same objects are independent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.decoder import Decoder
from mmspec.core.interfaces import Drafter, Request, Round
from mmspec.core.loop import speculate
from mmspec.core.plain import NoDrafter
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget
from mmspec.trees.jacobi import JacobiDrafter
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS, llama, precise
from tests.contracts.running import decode
from tests.tiny_models import tiny_lm

DRAFTERS: dict[str, Drafter] = {
    "none": NoDrafter(),
    "copy": CopyDrafter(4, min_match=1),
    "draft_model": DraftModelDrafter(CausalTarget(tiny_lm(seed=22)), 3),
    "jacobi": JacobiDrafter(4, "exact"),
}
SAMPLER = Sampler(0.8)


def begin(prompt: object, drafter: Drafter) -> tuple[Iterator[Round], Canvas]:
    tokens = list(prompt)  # type: ignore[call-overload]
    canvas = Canvas([tokens], Stopping(24), DecodingStats(), precise().device)
    request = Request({"input_ids": torch.tensor([tokens])})
    stream = RandomStream.from_seed(3, 1)
    return speculate(
        precise(), Decoder(drafter, SampleAndMatch()), SAMPLER, [request], canvas, stream
    ), canvas


def alone(prompt: object) -> list[list[int]]:
    return decode(precise(), [prompt], sampler=SAMPLER, max_new_tokens=24, seed=3).outputs  # type: ignore[list-item]


@pytest.mark.parametrize("name", DRAFTERS)
@pytest.mark.every(2)
def test_two_calls_taking_turns_are_two_calls_alone(name: str) -> None:
    calls = [begin(prompt, DRAFTERS[name]) for prompt in PROMPTS[:2]]
    running = [loop for loop, _ in calls]
    while running:
        running = [loop for loop in running if next(loop, None) is not None]
    assert [canvas.outputs() for _, canvas in calls] == [alone(prompt) for prompt in PROMPTS[:2]]


@pytest.mark.parametrize("name", ["copy", "jacobi"])
def test_a_call_given_up_in_the_middle_leaves_no_trace(name: str) -> None:
    given_up, _ = begin(PROMPTS[2], DRAFTERS[name])
    next(given_up), next(given_up)
    given_up.close()  # type: ignore[attr-defined]
    loop, canvas = begin(PROMPTS[0], DRAFTERS[name])
    for _ in loop:
        pass
    assert canvas.outputs() == alone(PROMPTS[0])


def test_a_round_that_raises_leaves_no_hook_on_the_model() -> None:
    class Broken(NoDrafter):
        taps = (0, -1)

        def propose(self, *args: object) -> None:  # type: ignore[override]
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        decode(llama(), PROMPTS, Broken())
    modules = llama().model.modules()
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in modules)
