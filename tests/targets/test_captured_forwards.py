"""Forward passes in CUDA graphs give the same tokens, although all memory has fixed addresses.

Without a GPU a graph is simulated by what it does to memory: a replay reads the addresses that the capture
read, and writes those that it wrote. Other memory does not change.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.simulated_gpu import SimulatedGPU
from mmspec.core.graphs import Graph
from mmspec.core.interfaces import Drafter
from mmspec.core.sampling import Sampler
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.targets import CausalTarget, steps
from mmspec.targets.prefix import PrefixCache
from mmspec.targets.steps import CapturedForward
from mmspec.trees.rejection import SpeculativeSampling
from tests.contracts.running import decode, random_prompts
from tests.methods.eagle_checks import head_for
from tests.tiny_models import tiny_llama, tiny_mistral_sliding
from tests.tiny_models.llamagen import tiny_llamagen

PROMPTS = random_prompts(3, seed=4)


class Tape:
    """Graphs that were captured, and how often they were replayed.

    Attributes:
        target: whose hooks write hidden states in a capture.
    """

    def __init__(self, target: CausalTarget) -> None:
        self.target, self.captures, self.replays = target, 0, 0

    def capture(self, function: Callable[..., Tensor], inputs: tuple[Tensor, ...], side: object) -> Graph:
        output, read = function(*inputs), self.states()
        self.captures += 1

        def replay() -> None:
            self.replays += 1
            output.copy_(function(*inputs))
            for old, new in zip(read, self.states(), strict=True):
                old.copy_(new)
            for reader in self.target._readers.values():
                reader.take()

        return Graph(replay, inputs, output, function)

    def states(self) -> list[Tensor]:
        return [
            state for reader in self.target._readers.values() for _, state in sorted(reader._states.items())
        ]


def captured(monkeypatch: pytest.MonkeyPatch, model: Any = None) -> tuple[CausalTarget, Tape]:
    target = CausalTarget(tiny_llama() if model is None else model)
    tape = Tape(target)
    monkeypatch.setattr(steps, "can_capture", lambda device: True)
    monkeypatch.setattr(steps, "capture", tape.capture)
    monkeypatch.setattr(steps, "Side", lambda *_: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    target.steps = CapturedForward(target.model, target.forward)
    return target, tape


DRAFTERS: dict[str, Callable[[CausalTarget], Drafter | None]] = {
    "none": lambda target: None,
    "copy": lambda target: CopyDrafter(),
    "eagle": lambda target: GrownTreeDrafter(head_for(target)).fit(target),
}
CASES = [("none", 3), ("copy", 1), ("eagle", 3)]


@pytest.mark.parametrize(("name", "rows"), CASES)
def test_batches_one_after_another_say_the_same(
    name: str, rows: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = CausalTarget(tiny_llama())
    expected = [decode(plain, PROMPTS[:rows], DRAFTERS[name](plain), max_new_tokens=40).outputs] * 2
    target, tape = captured(monkeypatch)
    drafter = DRAFTERS[name](target)
    found = [decode(target, PROMPTS[:rows], drafter, max_new_tokens=40).outputs for _ in expected]
    assert found == expected
    numbers = 4 if name == "copy" else 2  # of nodes: none copied, a quarter, half, all
    assert 0 < tape.captures <= 2 * numbers  # for two widths of attention, once for both batches
    assert tape.replays > 4 * tape.captures
    assert len(target.steps.caches._caches) == 1


def test_sliding_windows_are_masked_in_graphs_too(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = decode(CausalTarget(tiny_mistral_sliding()), PROMPTS, CopyDrafter(), max_new_tokens=40).outputs
    target, _ = captured(monkeypatch, tiny_mistral_sliding())
    assert decode(target, PROMPTS, CopyDrafter(), max_new_tokens=40).outputs == expected


def test_a_sampled_draft_keeps_the_distributions_of_its_earlier_forwards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each forward pass of a chain writes its logits to the same memory."""
    plain, draft = CausalTarget(tiny_llama()), CausalTarget(tiny_llama(layers=1))
    arguments: dict[str, Any] = {"sampler": Sampler(0.9), "max_new_tokens": 30, "seed": 3}
    rule = SpeculativeSampling()
    expected = decode(plain, PROMPTS, DraftModelDrafter(draft, 3, "sampled"), rule, **arguments).outputs
    target, tape = captured(monkeypatch, tiny_llama(layers=1))
    drafter = DraftModelDrafter(target, 3, "sampled")
    assert decode(plain, PROMPTS, drafter, rule, **arguments).outputs == expected
    assert tape.replays > 0


def test_numbers_of_an_earlier_batch_cannot_leak(monkeypatch: pytest.MonkeyPatch) -> None:
    """Zero times NaN is NaN, so that the test finds masked leaks too."""
    target, _ = captured(monkeypatch)
    expected = decode(target, PROMPTS[:1], CopyDrafter(), max_new_tokens=20).outputs
    with torch.inference_mode():
        for layer in target.steps.caches._caches[0].ragged:
            layer.keys.fill_(torch.nan)
            layer.values.fill_(torch.nan)
    assert decode(target, PROMPTS[:1], CopyDrafter(), max_new_tokens=20).outputs == expected


def test_a_prefix_cache_owns_what_it_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    target, _ = captured(monkeypatch)
    target.prefix_cache = PrefixCache(2**20, block=1)
    prompt = PROMPTS[0]
    longer = [*prompt, 5, 9]
    expected = decode(CausalTarget(tiny_llama()), [longer], max_new_tokens=12).outputs
    decode(target, [prompt], max_new_tokens=4)
    decode(target, [PROMPTS[1]], max_new_tokens=30)  # writes over the first one's keys
    run = decode(target, [longer], max_new_tokens=12)
    assert run.stats.cached_prompt_tokens > 0
    assert run.outputs == expected


def test_the_module_that_cannot_be_captured_is_named(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    target, tape = captured(monkeypatch)
    expected = decode(CausalTarget(tiny_llama()), PROMPTS[:1], max_new_tokens=12).outputs
    mlp = target.model.model.layers[1].mlp
    is_capturing = []

    def capture(*arguments: Any) -> Graph:
        is_capturing.append(True)
        try:
            return tape.capture(*arguments)
        finally:
            is_capturing.clear()

    def refuse(*_: object) -> None:
        if is_capturing:
            raise RuntimeError("operation not permitted when stream is capturing\nmore")

    monkeypatch.setattr(steps, "capture", capture)
    mlp.register_forward_hook(refuse)
    with caplog.at_level(logging.WARNING, "mmspec"):
        assert decode(target, PROMPTS[:1], max_new_tokens=12).outputs == expected
    assert "model.layers.1.mlp runs without a CUDA graph: operation not permitted" in caplog.text
    assert "more" not in caplog.text
    assert not mlp._forward_pre_hooks
    assert list(mlp._forward_hooks.values()) == [refuse]


@pytest.mark.gpu
@pytest.mark.parametrize(("name", "rows"), CASES)
def test_graphs_on_a_gpu_say_the_same(name: str, rows: int) -> None:
    plain, target = (CausalTarget(tiny_llama().cuda()) for _ in range(2))
    target.compile()
    expected = decode(plain, PROMPTS[:rows], DRAFTERS[name](plain), max_new_tokens=40).outputs
    for _ in range(2):
        assert decode(target, PROMPTS[:rows], DRAFTERS[name](target), max_new_tokens=40).outputs == expected
    assert all(target.steps._graphs.values())
    assert target.steps._graphs


@torch.inference_mode()
def test_a_cache_of_the_pool_belongs_to_one_batch_of_images() -> None:
    """Its owner is the state that the batch keeps, with the grammar of the images."""
    with SimulatedGPU():
        target = LlamaGenTarget(tiny_llamagen("class"))
        target.compile()
        prompt, _ = target.encode_prompt(1, None, target.grid, None)
        state, _ = target.prefill([prompt], 40)
        assert target.prefill([prompt], 40)[0].cache is not state.cache
        before = state.cache
        del state
        assert target.prefill([prompt], 40)[0].cache is before
