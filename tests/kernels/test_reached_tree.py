"""Trees, paths, rejection and the cache run as Triton kernels in real calls, and give the output of torch."""

import importlib
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from PIL import Image

from mmspec.acceptance.rejection import RecursiveRejection
from mmspec.assets import find_assets
from mmspec.decoding.draft import DraftKind
from mmspec.decoding.sampling import Sampler
from mmspec.pipelines import MMSpecPipeline
from mmspec.scenes import render, sample_scene
from mmspec.targets import CausalTarget
from tests.contracts.running import decode, random_prompts
from tests.oracles import SampledTreeDrafter
from tests.tiny_models import tiny_llama

LAUNCHERS = {
    "best_triton": "best_triton",
    "tree_paths_triton": "tree_triton",
    "tree_children_triton": "tree_triton",
    "match_path_triton": "tree_path_triton",
    "path_to_triton": "tree_path_triton",
    "deepest_node_triton": "tree_path_triton",
    "reject_tree_triton": "tree_rejection_triton",
    "compact_cache_triton": "compact_cache_triton",
}


@pytest.fixture
def launches(monkeypatch) -> Counter[str]:
    """How often each launcher was called."""
    pytest.importorskip("triton")
    counts: Counter[str] = Counter()

    def count(name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def counted(*args: Any) -> Any:
            counts[name] += 1
            return real(*args)

        return counted

    for name, module_name in LAUNCHERS.items():
        module = importlib.import_module(f"mmspec.kernels.{module_name}")
        monkeypatch.setattr(module, name, count(name, getattr(module, name)))
    return counts


@pytest.mark.parametrize(
    ("rule", "used"),
    [
        ("sample_and_match", {"tree_paths_triton", "match_path_triton", "path_to_triton"}),
        ("typical", {"tree_paths_triton", "deepest_node_triton", "path_to_triton"}),
    ],
)
def test_answers_by_a_tree_of_an_eagle_head(rule, used, launches, both, device):
    pipe: Any = MMSpecPipeline.from_pretrained(find_assets() / "scenes-llava", accelerator="none").to(device)
    head = find_assets() / "scenes-llava-eagle"
    pipe.set_accelerator("eagle", drafter=str(head), num_draft_tokens=8, depth=3, top_k=2, acceptance=rule)
    picture = Image.fromarray(render(sample_scene(21_001)))
    settings = dict(images=picture, max_new_tokens=8, do_sample=True, temperature=0.7, seed=5)
    ours, expected = both(pipe, "describe the picture in detail.", **settings)
    assert ours.tokens == expected.tokens and ours.stats.acceptance_length > 1
    assert used | {"best_triton", "compact_cache_triton"} <= set(launches), launches


@pytest.mark.parametrize("kind", [DraftKind.IID, DraftKind.WITHOUT_REPLACEMENT])
def test_recursive_rejection_of_sampled_trees(kind, launches, both, device):
    model = tiny_llama().to(device)
    vocabulary = model.config.vocab_size
    noise = torch.randn(vocabulary, vocabulary, generator=torch.Generator().manual_seed(0)).to(device)
    drafter = SampledTreeDrafter((noise / 4).softmax(-1), (3, 2), kind)
    roles = CausalTarget(model), random_prompts(3), drafter, RecursiveRejection(), Sampler(1.0)
    ours, expected = both(decode, *roles, max_new_tokens=12, seed=1)
    assert ours.outputs == expected.outputs and ours.stats.acceptance_length > 1.1
    assert {"reject_tree_triton", "tree_children_triton", "compact_cache_triton"} <= set(launches), launches
