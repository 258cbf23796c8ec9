"""Calls of pipelines and of the loop reach the kernels, and give what torch gives."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import AttentionInterface

from mmspec.acceptance import ACCEPTANCE_RULES
from mmspec.acceptance.rejection import RecursiveRejection, SpeculativeSampling
from mmspec.compressors import build_compressor
from mmspec.decoding.draft import DraftKind
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.draft_model import DraftModelDrafter
from mmspec.errors import UnsupportedModelError
from mmspec.models.head_checkpoint import load_head
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import render, sample_scene
from mmspec.targets import CausalTarget, attention
from tests.acceptance.codes import fitted
from tests.contracts.running import decode, random_prompts
from tests.oracles import RandomTreeDrafter, SampledTreeDrafter
from tests.tiny_models import HYBRID_TEXT_MODELS, TEXT_MODELS, tiny_llama

ASSETS = Path(__file__).parents[2] / "assets"
Both = Callable[..., tuple[Any, Any]]


@functools.cache
def pipeline(name: str) -> Any:
    pipe = MMSpecPipeline.from_pretrained(str(ASSETS / name), accelerator="none", dtype=torch.float32)
    if hasattr(pipe, "set_progress_bar_config"):
        pipe.set_progress_bar_config(disable=True)
    return pipe


def draw(accelerator: str, rounds: int = 3, **options: Any) -> tuple[list[list[int]], Any]:
    """The first rounds of an image of scenes-llamagen: tokens of its cells, and what was accepted."""
    pipe = pipeline("scenes-llamagen")
    pipe.set_accelerator(accelerator, **options)
    output = pipe(
        "a red ring left of a small blue square",
        seed=3,
        output_type="latent",
        callback_on_step_end=lambda pipe, step, *_: pipe.interrupt() if step + 1 == rounds else None,
    )
    return output.tokens, output.stats


def describe(accelerator: str = "none", max_new_tokens: int = 6, **settings: Any) -> tuple[Any, Any]:
    """The first words about a scene, by scenes-llava."""
    pipe = pipeline("scenes-llava")
    options = settings.pop("options", {})
    pipe.set_accelerator(accelerator, **options)
    picture = Image.fromarray(render(sample_scene(21_001)))
    output = pipe("describe the picture.", images=picture, max_new_tokens=max_new_tokens, **settings)
    return output.tokens, output.stats


def reaches(
    both: Both, launched: Counter[str], launchers: set[str], call: Callable[..., Any], **how: Any
) -> Any:
    """The statistics of both; outputs are equal, and each launcher was called."""
    (ours, stats), (expected, twin) = both(call, **how)
    assert ours == expected and any(map(len, ours))
    assert stats.acceptance_length == twin.acceptance_length
    assert launchers <= set(launched), launched
    return stats, twin


IMAGES: dict[str, tuple[set[str], str, dict[str, Any]]] = {
    "plain": ({"sample"}, "none", {}),
    "sjd": ({"warp", "verify_chain", "redraw"}, "sjd", {"window": 4, "coupling": "maximal"}),
    "gsd": ({"rank_ratio"}, "gsd", {"window": 4}),
    "lantern": ({"nearby_mass"}, "lantern", {"window": 4, "neighbours": 10}),
    "lantern as published": (
        {"nearby_prefix"},
        "lantern",
        {"window": 4, "neighbours": 10, "acceptance": "lantern"},
    ),
}


@pytest.mark.parametrize("name", IMAGES)
def test_images_reach_the_kernels(name: str, both: Both, launched: Counter[str]) -> None:
    launchers, accelerator, options = IMAGES[name]
    stats, twin = reaches(both, launched, launchers, draw, accelerator=accelerator, **options)
    if twin.tv_mean is not None:
        torch.testing.assert_close(stats.tv_mean, twin.tv_mean, rtol=1e-4, atol=1e-5)


TREE = {"drafter": str(ASSETS / "scenes-llava-eagle"), "num_draft_tokens": 8, "depth": 3, "top_k": 2}


@pytest.mark.parametrize(
    ("rule", "launchers"),
    [
        ("sample_and_match", {"tree_paths", "match_path", "path_to", "tree_attention"}),
        ("typical", {"tree_paths", "deepest_node", "path_to"}),
    ],
)
def test_answers_by_a_tree_of_a_head(
    rule: str, launchers: set[str], both: Both, launched: Counter[str]
) -> None:
    how = {"options": {**TREE, "acceptance": rule}, "do_sample": True, "temperature": 0.7, "seed": 5}
    stats, _ = reaches(
        both, launched, launchers | {"best", "compact_cache"}, describe, accelerator="eagle", **how
    )
    assert stats.acceptance_length > 1


def test_answers_that_are_sampled(both: Both, launched: Counter[str]) -> None:
    how = {"temperature": 0.8, "top_k": 20, "top_p": 0.9, "seed": 3, "max_new_tokens": 4}
    reaches(both, launched, {"sample"}, describe, **how)


def test_a_head_that_merges_visual_tokens(both: Both, launched: Counter[str]) -> None:
    target = pipeline("scenes-llava").target
    head = load_head("eagle", ASSETS / "scenes-llava-eagle", target.config, target.dtype, target.device)
    head.compressor = build_compressor("merging", head.compressor.width, tokens=12)
    launchers = {"most_similar", "merge_vectors"}
    reaches(both, launched, launchers, describe, accelerator="eagle", options={"drafter": head})


@pytest.mark.parametrize(
    ("name", "options", "launcher"),
    [
        ("grouped", {"group_size": 5}, "rank_ratio_at"),
        ("budget", {"relaxation": "groups", "group_size": 5}, "rank_ratio_at"),
        ("budget", {"neighbours": 5}, "nearby_prefix"),
        ("lantern", {"neighbours": 5, "reference": True}, "nearby_prefix"),
    ],
)
def test_rules_judge_deterministic_candidates_by_their_own_token_alone(
    name: str, options: dict[str, Any], launcher: str, both: Both, launched: Counter[str]
) -> None:
    rule: Any = fitted(ACCEPTANCE_RULES[name](**options), 40, 3)
    p = torch.rand(2, 3, 40, generator=torch.Generator().manual_seed(8)).pow(4)
    x, allowance = torch.tensor([[3, 39, 20], [0, 7, 11]])[..., None], torch.full((2, 3, 1), 0.1)
    kernel, twin = both(rule.judge, p / p.sum(-1, keepdim=True), None, x, allowance)
    assert launched[launcher]
    for field in ("accepted", "tv"):
        torch.testing.assert_close(getattr(kernel, field), getattr(twin, field), rtol=1e-5, atol=1e-6)


def test_a_sampled_chain_of_a_draft_model(both: Both, device: torch.device, launched: Counter[str]) -> None:
    model, small = tiny_llama().to(device), tiny_llama().to(device)
    small.lm_head.weight.data /= 2  # flatter, so that some candidates are refused
    drafter = DraftModelDrafter(CausalTarget(small), 3, "sampled")
    roles = CausalTarget(model), random_prompts(2), drafter, SpeculativeSampling(), Sampler(1.0)
    ours, expected = both(decode, *roles, max_new_tokens=6, seed=1)
    assert launched["verify_chain"] and ours.outputs == expected.outputs
    assert 1 < ours.stats.acceptance_length < 4


@pytest.mark.parametrize("kind", [DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT])
def test_recursive_rejection_of_sampled_trees(
    kind: DraftKind, both: Both, device: torch.device, launched: Counter[str]
) -> None:
    model = tiny_llama().to(device)
    vocabulary = model.config.vocab_size
    noise = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0)).to(device)
    drafter = SampledTreeDrafter((noise / 4).softmax(-1), (3, 2), kind)
    roles = CausalTarget(model), random_prompts(2), drafter, RecursiveRejection(), Sampler(1.0)
    ours, expected = both(decode, *roles, max_new_tokens=8, seed=1)
    assert ours.outputs == expected.outputs and ours.stats.acceptance_length > 1
    assert {"reject_tree", "tree_children", "compact_cache"} <= set(launched), launched


@pytest.mark.parametrize("name", ["mistral_sliding", "qwen2_mixed_sliding", "qwen3_5"])
def test_trees_in_ragged_rows_say_the_same(name: str, both: Both, launched: Counter[str]) -> None:
    target = CausalTarget({**TEXT_MODELS, **HYBRID_TEXT_MODELS}[name]())
    prompts = random_prompts(2, shortest=5, longest=14, seed=2)
    kernel, sdpa = both(lambda: decode(target, prompts, RandomTreeDrafter(6, 64), max_new_tokens=4).outputs)
    assert kernel == sdpa and launched["tree_attention"]
    assert bool(launched["gated_delta_tree"]) == (name == "qwen3_5")
    assert target.model.config._attn_implementation == "sdpa"


def test_soft_caps_keep_the_attention_that_they_have(both: Both, launched: Counter[str]) -> None:
    target = CausalTarget(TEXT_MODELS["gemma2"]())
    prompts = random_prompts(1, shortest=5, longest=5, seed=2)
    kernel, sdpa = both(lambda: decode(target, prompts, None, max_new_tokens=2).outputs)
    assert kernel == sdpa and not launched["tree_attention"]


def test_what_attention_cannot_express_is_an_error() -> None:
    module = torch.nn.Module()
    states = torch.zeros(1, 1, 1, 8)
    mask = torch.zeros(1, 1, 1, 3, dtype=torch.int32)
    attend = AttentionInterface()[attention.NAME]
    with pytest.raises(UnsupportedModelError, match="softcap"):
        attend(module, states, states, states, mask, softcap=30.0)
    with pytest.raises(UnsupportedModelError, match="another mask"):
        attend(module, states, states, states, mask.bool())
