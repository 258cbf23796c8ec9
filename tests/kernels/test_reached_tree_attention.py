"""Pipelines and targets reach `tree_attention` and `gated_delta_tree`, and say the same with them."""

import importlib

import pytest
import torch
from transformers import AttentionInterface

from mmspec import MMSpecPipeline
from mmspec.errors import UnsupportedModelError
from mmspec.targets import CausalTarget, attention
from tests.contracts.running import decode, random_prompts
from tests.oracles import RandomTreeDrafter
from tests.tiny_models import HYBRID_TEXT_MODELS, TEXT_MODELS, tiny_image


@pytest.fixture
def calls(monkeypatch):
    """Names of the ops that are called, in their order."""
    pytest.importorskip("triton")
    seen = []

    def spy(module, name):
        real = getattr(module, name)

        def call(*args):
            seen.append(name)
            return real(*args)

        monkeypatch.setattr(module, name, call)

    for name in ("tree_attention", "gated_delta"):
        triton_module = importlib.import_module(f"mmspec.kernels.{name}_triton")
        spy(triton_module, "tree_attention_triton" if name == "tree_attention" else "gated_delta_tree_triton")
    return seen


def with_backends(monkeypatch, function):
    results = []
    for backend in ("torch", "triton"):
        monkeypatch.setenv("MMSPEC_BACKEND", backend)
        results.append(function())
    return results


@pytest.mark.parametrize("name", ["llama", "mistral_sliding", "qwen2_mixed_sliding", "qwen3_5"])
def test_trees_in_ragged_rows_say_the_same(monkeypatch, calls, name):
    target = CausalTarget({**TEXT_MODELS, **HYBRID_TEXT_MODELS}[name]())
    prompts = random_prompts(2, shortest=5, longest=14, seed=2)

    def run():
        return decode(target, prompts, RandomTreeDrafter(6, 64), max_new_tokens=4).outputs

    sdpa, kernel = with_backends(monkeypatch, run)
    assert kernel == sdpa
    assert "tree_attention_triton" in calls
    assert ("gated_delta_tree_triton" in calls) == (name == "qwen3_5")
    assert target.model.config._attn_implementation == "sdpa"


def test_a_caption_is_the_same(monkeypatch, calls):
    pipe = MMSpecPipeline.from_pretrained("assets/scenes-llava", accelerator="copy", dtype=torch.float32)
    image = tiny_image()
    sdpa, kernel = with_backends(
        monkeypatch, lambda: pipe("What is in the picture?", images=image, max_new_tokens=4).tokens
    )
    assert kernel == sdpa and "tree_attention_triton" in calls


def test_soft_caps_keep_the_attention_that_they_have(monkeypatch, calls):
    target = CausalTarget(TEXT_MODELS["gemma2"]())
    prompts = random_prompts(1, shortest=5, longest=5, seed=2)
    sdpa, kernel = with_backends(monkeypatch, lambda: decode(target, prompts, None, max_new_tokens=2).outputs)
    assert kernel == sdpa and not calls


def test_what_attention_cannot_express_is_an_error():
    module = torch.nn.Module()
    states = torch.zeros(1, 1, 1, 8)
    mask = torch.zeros(1, 1, 1, 3, dtype=torch.int32)
    attend = AttentionInterface()[attention.NAME]
    with pytest.raises(UnsupportedModelError, match="softcap"):
        attend(module, states, states, states, mask, softcap=30.0)
    with pytest.raises(UnsupportedModelError, match="another mask"):
        attend(module, states, states, states, mask.bool())
