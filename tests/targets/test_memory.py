"""Memory plans are of the bytes that a cache then holds."""

from __future__ import annotations

import pytest
import torch

from mmspec.decoding.cache import CAPACITY_BLOCK
from mmspec.errors import InputError
from mmspec.targets import CausalTarget, MaskedTarget
from mmspec.targets.memory import MemoryPlan
from tests.contracts.running import decode
from tests.targets.test_masked import tiny_masked
from tests.tiny_models import TEXT_MODELS, tiny_llama, tiny_lm

PROMPTS = [[1, 2, 3], [4, 5]]


@pytest.mark.parametrize("name", TEXT_MODELS)
def test_the_cache_takes_what_is_planned(name: str) -> None:
    target = CausalTarget(TEXT_MODELS[name]())
    held = decode(target, PROMPTS, max_new_tokens=4).stats.cache_bytes
    plan = MemoryPlan.of(target, 2, CAPACITY_BLOCK, 1)
    assert plan.cache == held
    assert plan.total == plan.weights + plan.cache + plan.logits


def test_weights_of_both_models_count_once() -> None:
    target, draft = CausalTarget(tiny_lm()), tiny_llama()
    alone = MemoryPlan.of(target, 1, 8, 1).weights
    assert alone == sum({id(one): one.nbytes for one in target.model.parameters()}.values())
    both = MemoryPlan.of(target, 1, 8, 1, draft).weights
    assert both == alone + sum({id(one): one.nbytes for one in draft.parameters()}.values())
    assert MemoryPlan.of(target, 1, 8, 1, target.model).weights == alone


def test_logits_grow_with_the_nodes_and_a_masked_model_caches_nothing() -> None:
    target = CausalTarget(tiny_lm())
    assert MemoryPlan.of(target, 3, 8, 5).logits == 15 * MemoryPlan.of(target, 1, 8, 1).logits > 0
    assert MemoryPlan.of(MaskedTarget(tiny_masked(), 0), 1, 8, 1).cache == 0


def test_a_batch_that_does_not_fit_is_refused_before_anything_is_allocated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plan, free = MemoryPlan(10**9, 3 * 10**6, 10**6), 5 * 10**6
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (free, 10**10))
    plan.check(8, torch.device("cuda"))
    free = 10**6
    with pytest.raises(InputError, match=r"batch_sizes: got 8; fewer: 4\.0 MB .* 1\.0 MB are free"):
        plan.check(8, torch.device("cuda"))
    plan.check(8, torch.device("cpu"))


def test_a_plan_is_printed_in_megabytes() -> None:
    assert str(MemoryPlan(2 * 10**9, 10**6, 500_000)) == (
        "2,001.5 MB planned: 2,000.0 MB of weights, 1.0 MB of keys and values, 0.5 MB of logits"
    )
