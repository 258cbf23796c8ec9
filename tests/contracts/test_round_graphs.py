"""Rounds in graphs give the same results, on a simulated GPU: see `benchmarks.simulated_gpu`."""

from __future__ import annotations

import logging
from dataclasses import replace
from typing import Any

import pytest
import torch
from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

from benchmarks.simulated_gpu import SimulatedGPU
from mmspec.core import round_graphs
from mmspec.core.draft import DraftKind
from mmspec.core.sampling import Sampler
from mmspec.core.session import ModelDrafter
from mmspec.pipelines.vision_language import VisionLanguagePipeline
from mmspec.targets import CausalTarget
from mmspec.targets.steps import CapturedForward
from mmspec.trees.matching import SampleAndMatch
from tests.contracts.checks import PROMPTS
from tests.contracts.running import Run, decode, random_prompts
from tests.contracts.test_late_reading import AHEAD, CASES, SAMPLER, same
from tests.methods import eagle_checks
from tests.oracles import tree_of
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_image, tiny_lm

#: Drafters that make tables for each batch, and so have graphs for each batch.
TABLES = ("cjd",)
UNPOOLED = ("draft_model",)  # its draft model is not compiled here, so that each batch has caches of its own
CALLS: list[tuple[Any, dict[str, Any]]] = [
    (PROMPTS, {"seed": [7, 8, 9], "end": (1, 5, 9)}),
    (random_prompts(3, seed=11), {"seed": [1, 2, 3], "end": (2, 6, 8)}),
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
    rule = rule or SampleAndMatch()
    if target.steps is not None and not isinstance(drafter, ModelDrafter):  # whose model other tests use
        drafter.compile()
    runs = []
    for prompts, settings in CALLS:
        settings = {"sampler": SAMPLER, "max_new_tokens": 24, **settings}
        runs.append(decode(target, prompts, drafter, rule, settings.pop("sampler"), **settings))
    return runs


@pytest.mark.parametrize("name", AHEAD)
@pytest.mark.every(12)
def test_replayed_rounds_are_the_same(name: str) -> None:
    expected = calls(CausalTarget(tiny_lm()), name)
    target = captured()
    with SimulatedGPU() as gpu:
        found = calls(target, name)
    assert all(map(same, found, expected))
    graphs = [each for each in target.steps.rounds._graphs.values() if each]  # type: ignore[union-attr]
    if not name.startswith(TABLES + UNPOOLED):
        # sampled, greedy and of one row, and perhaps the first of a window: the second batch needs none
        assert len(graphs) <= 4
        assert gpu.counts.replays > 20


def test_a_batch_that_keeps_values_of_an_earlier_one_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = calls(CausalTarget(tiny_lm()), "eagle")
    real = round_graphs.Steady.bind

    def forgetful(steady: Any, own: Any) -> None:
        both = zip(steady.leaves, own, strict=True)
        lines = [(tensor, tensor.clone()) for leaf, tensor in both if leaf.name == "_line"]
        real(steady, own)
        for tensor, before in lines:
            tensor.copy_(before)

    monkeypatch.setattr(round_graphs.Steady, "bind", forgetful)
    with SimulatedGPU():
        found = calls(captured(), "eagle")
    assert not all(map(same, found, expected))


def test_a_move_overwrites_no_value_that_another_needs() -> None:
    one, two, fresh = torch.tensor([1, 2]), torch.tensor([3, 4]), torch.tensor([5, 6])
    tensors, after = [one, two, fresh], [two, one.flip(0), fresh]
    for old, new in round_graphs.moves(tensors, after):
        old.copy_(new)
    assert [one.tolist(), two.tolist(), fresh.tolist()] == [[3, 4], [2, 1], [5, 6]]


def test_values_derived_before_a_replay_are_computed_anew() -> None:
    tokens = torch.zeros(1, 3, dtype=torch.long)
    chain, fork = (tree_of(tokens, parents, DraftKind.POINT) for parents in ([0, 0, 1], [0, 0, 0]))
    held = replace(chain, max_children=2)  # a chain has no tree to derive
    assert held.depth.tolist() == [[0, 1, 2]]
    steady = round_graphs.Steady([held])
    own = [leaf.value.clone() for leaf in steady.leaves]
    steady.bind(own)
    for leaf, tensor in zip(steady.leaves, own, strict=True):
        tensor.copy_(getattr(fork, leaf.name, tensor))  # as a replay does
    assert held.depth.tolist() == [[0, 1, 2]]
    steady.forget_derived()
    assert held.depth.tolist() == [[0, 1, 1]]


def test_settings_of_the_same_parts_share_a_graph() -> None:
    def penalised(*penalties: float, **settings: Any) -> Sampler:
        rows = [LogitsProcessorList([RepetitionPenaltyLogitsProcessor(each)]) for each in penalties]
        return Sampler(processors=rows, **settings)

    samplers = [
        penalised(1.3, 1.3, 1.3, temperature=0.9, top_p=0.9),
        penalised(1.3, 1.3, 1.3, temperature=0.9, top_p=0.9),
        penalised(3.0, 1.3, 1.1, temperature=(0.9, 1.4, 0.3), top_p=(0.9, 0.4, 0.7)),
    ]
    drafter, rule = CASES["medusa"]()[0], SampleAndMatch()
    plain, target = CausalTarget(tiny_lm()), captured()
    expected = [decode(plain, PROMPTS, drafter, rule, each, max_new_tokens=20) for each in samplers]
    with SimulatedGPU():
        found = [decode(target, PROMPTS, drafter, rule, each, max_new_tokens=20) for each in samplers]
    assert all(map(same, found, expected))
    assert expected[0].outputs != expected[2].outputs
    graphs = target.steps.rounds._graphs  # type: ignore[union-attr]
    assert len(graphs) == 1 and None not in graphs.values()


@pytest.mark.every(2)
@pytest.mark.parametrize("accelerator", ["none", "eagle"])
def test_a_compiled_pipeline_captures_nothing_at_a_request(accelerator: str) -> None:
    model, processor = VISION_LANGUAGE_FAMILIES["llava"]()
    options = {}
    if accelerator == "eagle":
        options["drafter"] = eagle_checks.head_for(CausalTarget(model))
    settings: dict[str, Any] = {"images": tiny_image(), "max_new_tokens": 40}
    plain = VisionLanguagePipeline(model, processor, accelerator=accelerator, **options)
    expected = [plain("a b", temperature=0, **settings).tokens, plain("a", **settings, seed=3).tokens]
    with SimulatedGPU() as gpu:
        pipe = VisionLanguagePipeline(model, processor, accelerator=accelerator, **options).compile()
        assert gpu.take().captures > 0
        found = [pipe("a b", temperature=0, **settings).tokens, pipe("a", **settings, seed=3).tokens]
        counts = gpu.take()
    assert found == expected
    assert counts.captures == 0
    assert counts.replays > 10


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


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["none", "medusa", "jacobi"])
def test_rounds_in_graphs_are_the_same_on_a_gpu(name: str) -> None:
    drafter, rule = CASES[name]()
    drafter.to(device="cuda")
    runs, targets = [], [CausalTarget(tiny_lm().float().cuda()) for _ in range(2)]
    targets[1].compile()
    for target in targets:
        fitted = drafter.fit(target)
        settings: dict[str, Any] = {"max_new_tokens": 40, "seed": [7, 8, 9]}
        runs.append([decode(target, PROMPTS, fitted, rule, SAMPLER, **settings).outputs for _ in range(2)])
    assert runs[0] == runs[1]
    graphs = targets[1].steps.rounds._graphs  # type: ignore[union-attr]
    assert graphs and None not in graphs.values()
