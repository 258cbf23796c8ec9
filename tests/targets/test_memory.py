"""Memory plans and measurements match the memory of decoding; requests that do not fit are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.core.cache import CAPACITY_BLOCK
from mmspec.core.draft import DraftKind, Tree
from mmspec.errors import InputError
from mmspec.targets import CausalTarget, memory
from mmspec.targets.memory import MemoryPlan, measure_states
from mmspec.targets.mixers import find_mixers
from tests.contracts.running import decode
from tests.tiny_models import (
    HYBRID_TEXT_MODELS,
    STEPPED_MODELS,
    TEXT_MODELS,
    tiny_qwen3_5,
)

PROMPTS = [[1, 2, 3], [4, 5]]
ROWS, NODES = 2, 5


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_the_cache_takes_what_is_planned(name: str) -> None:
    target = CausalTarget(TEXT_MODELS[name]())
    held = decode(target, PROMPTS, max_new_tokens=4).stats.cache_bytes
    plan = MemoryPlan.of(target, 2, CAPACITY_BLOCK, 1)
    assert plan.cache == held
    assert plan.total == plan.weights + plan.cache + plan.logits


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, free = MemoryPlan(10**9, 3 * 10**6, 10**6), 5 * 10**6
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**10))
    plan.check(8, torch.device("cuda"))
    free = 10**6
    with pytest.raises(InputError, match=r"batch_sizes must be smaller: 4\.0 MB .* 1\.0 MB are free; got 8"):
        plan.check(8, torch.device("cuda"))
    plan.check(8, torch.device("cpu"))


@pytest.mark.parametrize("name", HYBRID_TEXT_MODELS)
def test_a_draft_takes_what_was_measured(name: str) -> None:
    target = CausalTarget(HYBRID_TEXT_MODELS[name]())
    measured = measure_states(target.model)
    prompts = [{"input_ids": torch.arange(1, 4)[None]}] * ROWS
    state, _ = target.prefill(prompts, 16)
    held = {}
    for count in (NODES, 2 * NODES):
        draft = Tree.chain(torch.ones(ROWS, count, dtype=torch.long), DraftKind.POINT)
        target.score(state, draft)
        held[count] = [layer.scored.nbytes() for layer in state.cache.recurrent]
    for index, one in enumerate(measured):
        assert state.cache.recurrent[index].nbytes() == ROWS * one.row > 0
        assert held[2 * NODES][index] - held[NODES][index] == ROWS * NODES * one.node > 0
        assert one.is_closed == (name not in STEPPED_MODELS)
        # a closed form does not store the state of every node
        assert one.is_closed or one.node == one.row
    assert target.node_bytes == sum(one.node for one in measured)


def test_a_draft_that_does_not_fit_is_refused_with_the_number_that_would(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    target, free = CausalTarget(tiny_qwen3_5()), 0
    free = 7 * ROWS * target.node_bytes
    monkeypatch.setattr(memory, "free_bytes", lambda device: free)
    state, _ = target.prefill([{"input_ids": torch.tensor([[1, 2]])}] * ROWS, 16)

    def score(count: int) -> Any:
        return target.score(state, Tree.chain(torch.ones(ROWS, count, dtype=torch.long), DraftKind.POINT))

    score(7)
    calls: list[Any] = []
    handle = find_mixers(target.model)[0].register_forward_pre_hook(lambda *args: calls.append(args))
    with pytest.raises(InputError, match=r"num_draft_tokens must be at most 6: .* each of 2 rows.*; got 7"):
        score(8)
    handle.remove()
    assert not calls
    free = 0
    assert decode(target, [[1, 2, 3]], max_new_tokens=4).outputs  # plain decoding keeps no draft
