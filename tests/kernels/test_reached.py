"""Calls of pipelines and of the loop use the kernels, and return the results of torch."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch

from mmspec.core.draft import DraftKind
from mmspec.core.interfaces import AcceptanceRule, Drafter
from mmspec.core.sampling import Sampler
from mmspec.errors import UnsupportedModelError
from mmspec.heads.feature_session import GrownTreeDrafter
from mmspec.methods.draft_model.drafter import DraftModelDrafter
from mmspec.methods.typical.rule import Typical
from mmspec.targets import CausalTarget, attention
from mmspec.trees.matching import SampleAndMatch
from mmspec.trees.rejection import RecursiveRejection, SpeculativeSampling
from tests.contracts.running import decode, random_prompts
from tests.methods.eagle_checks import head_for
from tests.oracles import RandomTreeDrafter, SampledTreeDrafter
from tests.tiny_models import HYBRID_TEXT_MODELS, TEXT_MODELS, tiny_llama

Both = Callable[..., tuple[Any, Any]]


def head(target: CausalTarget) -> Drafter:
    return GrownTreeDrafter(head_for(target), num_draft_tokens=6, depth=2, top_k=2).fit(target)


def draft_model(target: CausalTarget) -> Drafter:
    small = tiny_llama().to(target.device)
    small.lm_head.weight.data /= 2  # flatter, so that some candidates are refused
    return DraftModelDrafter(CausalTarget(small), 3, "sampled")


def siblings(target: CausalTarget) -> Drafter:
    noise = torch.randn(2 * [target.vocabulary], generator=torch.Generator().manual_seed(0))
    q = (noise.to(target.device) / 4).softmax(-1)
    return SampledTreeDrafter(q, (3, 2), DraftKind.WITHOUT_REPLACEMENT)


def points(target: CausalTarget) -> Drafter:
    return RandomTreeDrafter(6, target.vocabulary)


OF_LAYERS = {"rms_norm", "add_rms_norm", "rotate_into_cache", "gated_product"}
ROLES: list[tuple[Callable[[CausalTarget], Drafter], AcceptanceRule, set[str]]] = [
    (head, SampleAndMatch(), {"best", "tree_paths", "match_path", "tree_attention", *OF_LAYERS}),
    (points, Typical(0.01, 0.01), {"tree_paths", "deepest_node", "path_to", "compact_cache"}),
    (draft_model, SpeculativeSampling(), {"verify_chain"}),
    (siblings, RecursiveRejection(), {"reject_tree", "tree_children", "compact_cache"}),
]


@pytest.mark.slow
@pytest.mark.parametrize(("drafter", "rule", "launchers"), ROLES)
@pytest.mark.every(4)
def test_rules_and_drafters(
    drafter: Callable[[CausalTarget], Drafter],
    rule: AcceptanceRule,
    launchers: set[str],
    both: Both,
    device: torch.device,
    launched: Counter[str],
) -> None:
    target = CausalTarget(tiny_llama().to(device))
    roles = target, random_prompts(2), drafter(target), rule, Sampler(1.0)
    ours, expected = both(decode, *roles, max_new_tokens=4, seed=1)
    assert ours.outputs == expected.outputs
    assert ours.stats.accepted_histogram == expected.stats.accepted_histogram
    assert launchers <= set(launched), launched


@pytest.mark.parametrize("name", ["qwen2_mixed_sliding", "qwen3_5"])
@pytest.mark.every(2)
def test_trees_in_ragged_rows_say_the_same(name: str, both: Both, launched: Counter[str]) -> None:
    target = CausalTarget({**TEXT_MODELS, **HYBRID_TEXT_MODELS}[name]())
    prompts = random_prompts(2, shortest=5, longest=14, seed=2)
    kernel, sdpa = both(lambda: decode(target, prompts, RandomTreeDrafter(6, 64), max_new_tokens=3).outputs)
    assert kernel == sdpa and launched["tree_attention"]
    assert bool(launched["gated_delta_tree"]) == (name == "qwen3_5")
    assert target.model.config._attn_implementation == "sdpa"


def test_what_attention_cannot_express_is_an_error() -> None:
    module = torch.nn.Module()
    states = torch.zeros(1, 1, 1, 8)
    mask = torch.zeros(1, 1, 1, 3, dtype=torch.int32)
    with pytest.raises(UnsupportedModelError, match="softcap"):
        attention.attend(module, states, states, states, mask, softcap=30.0)
    with pytest.raises(UnsupportedModelError, match="another mask"):
        attention.attend(module, states, states, states, mask.bool())
