"""Rounds in graphs give the same results, on a simulated GPU: see `benchmarks.simulated_gpu`."""

from __future__ import annotations

import logging
from typing import Any

import pytest
from torch import Tensor

from benchmarks.simulated_gpu import SimulatedGPU
from mmspec.core import round_graphs
from mmspec.core.sampling import Sampler
from mmspec.targets import CausalTarget
from mmspec.targets.steps import CapturedForward
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS
from tests.contracts.running import Run, decode, random_prompts
from tests.contracts.test_late_reading import AHEAD, CASES, SAMPLER, same
from tests.tiny_models import tiny_lm

#: Drafters whose state between rounds is not all tensors; their rounds are launched one operation at a time.
EAGER = ("dflash", "dspark")
CALLS: list[tuple[Any, dict[str, Any]]] = [
    (PROMPTS, {"seed": [7, 8, 9]}),
    (random_prompts(3, seed=11), {"seed": [1, 2, 3], "end": (1, 5, 9)}),
    (PROMPTS, {"sampler": Sampler()}),
    (PROMPTS[:1], {"max_new_tokens": 9}),
]


def captured() -> CausalTarget:
    target = CausalTarget(tiny_lm())
    target.steps = CapturedForward(target.model, target.forward)
    return target


def calls(target: CausalTarget, name: str) -> list[Run]:
    """Decode the batches of `CALLS` one after the other, with one drafter."""
    drafter, rule = CASES[name]()
    runs = []
    for prompts, settings in CALLS:
        settings = {"sampler": SAMPLER, "max_new_tokens": 24, **settings}
        runs.append(decode(target, prompts, drafter, rule, settings.pop("sampler"), **settings))
    return runs


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.every(7)
def test_replayed_rounds_are_the_same(name: str) -> None:
    expected = calls(CausalTarget(tiny_lm()), name)
    target = captured()
    with SimulatedGPU() as gpu:
        found = calls(target, name)
    assert all(map(same, found, expected))
    graphs = target.steps.rounds._graphs  # type: ignore[union-attr]
    assert None not in graphs.values()
    if not name.startswith(EAGER):
        assert len(graphs) == 3  # sampled, greedy and of one row: the second batch has the graph of the first
        assert gpu.counts.replays > 40


def test_a_graph_knows_nothing_of_an_earlier_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = calls(CausalTarget(tiny_lm()), "eagle")
    monkeypatch.setattr(round_graphs.Leaf, "set", lambda leaf, tensor: None)  # the batch keeps its own tensors
    with SimulatedGPU():
        found = calls(captured(), "eagle")
    assert not all(map(same, found, expected))


def test_values_that_a_move_overwrites_are_copied_first(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = calls(CausalTarget(tiny_lm()), "eagle3")

    def careless(tensors: list[Tensor], after: list[Tensor]) -> Any:
        return [(old, new) for old, new in zip(tensors, after, strict=True) if old is not new][:-1]

    monkeypatch.setattr(round_graphs, "moves", careless)
    with SimulatedGPU():
        found = calls(captured(), "eagle3")
    assert not all(map(same, found, expected))


class Reading(SampleAndMatch):
    """A rule that reads the device in every round."""

    def decide(self, draft: Any, *args: Any) -> Any:
        draft.tokens.sum().item()
        return super().decide(draft, *args)


def test_rounds_that_cannot_be_captured_are_launched(caplog: pytest.LogCaptureFixture) -> None:
    drafter, _ = CASES["eagle"]()
    expected = decode(CausalTarget(tiny_lm()), PROMPTS, drafter, Reading(), SAMPLER, max_new_tokens=24)
    target = captured()
    with SimulatedGPU(), caplog.at_level(logging.WARNING, "mmspec"):
        found = decode(target, PROMPTS, drafter, Reading(), SAMPLER, max_new_tokens=24)
    assert same(found, expected)
    assert caplog.text.count("rounds run without a CUDA graph of their own") == 1
    assert list(target.steps.rounds._graphs.values()) == [None]  # type: ignore[union-attr]
