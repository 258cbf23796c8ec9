"""Fused kernels while drafts are scored: which modules are replaced, for whom, and what they compute."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import transformers as hf
from torch import Tensor, nn

from benchmarks.launches import FAMILIES, PIXELS, count_layer
from benchmarks.simulated_gpu import SimulatedGPU
from mmspec.core.draft import Draft, DraftKind, Tree
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.models.replaced import Confined
from mmspec.targets import CausalTarget, adapt, causal
from mmspec.targets.fused import (
    FUSED,
    find_fused,
    fused,
    fused_attention,
    fused_feed_forward,
    fused_norm,
)
from mmspec.targets.steps import CapturedForward
from tests.contracts.running import decode, random_prompts
from tests.oracles import RandomTreeDrafter
from tests.tiny_models import TEXT_MODELS, randomise, tiny_llama

PROMPTS = random_prompts(2, shortest=5, longest=12, seed=3)
PACKED = torch.zeros(1, 1, 1, 3, dtype=torch.int32)


def of_family(name: str, kind: str | None = None, **settings: Any) -> Any:
    """A random decoder of a family of transformers, with two layers."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "tie_word_embeddings": False}
    config = getattr(hf, f"{name}Config")(**sizes, **heads, **settings)
    model = getattr(hf, kind or f"{name}ForCausalLM")(config)
    return randomise(model, 3).eval().requires_grad_(False)


def tiny_qwen3() -> Any:
    return of_family("Qwen3", head_dim=16)


def tiny_gemma3() -> Any:
    kinds = {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 7}
    return of_family("Gemma3Text", "Gemma3ForCausalLM", head_dim=16, query_pre_attn_scalar=12, **kinds)


def tiny_chameleon() -> Any:
    return of_family("Chameleon", "ChameleonForConditionalGeneration", **PIXELS)


def of_counted(name: str) -> Any:
    return randomise(FAMILIES[name](2).model, 3).eval().requires_grad_(False)


MODELS: dict[str, Callable[[], Any]] = {
    "llama": tiny_llama,
    "mistral": TEXT_MODELS["mistral_sliding"],
    "qwen2": TEXT_MODELS["qwen2_mixed_sliding"],
    "qwen3": tiny_qwen3,
    "gemma": lambda: of_family("Gemma", head_dim=16),
    "gemma3": tiny_gemma3,
    "chameleon": tiny_chameleon,
    "qwen2_vl": partial(of_counted, "Qwen2-VL"),
    "qwen2_5_vl": partial(of_counted, "Qwen2.5-VL"),
    "qwen3_vl": partial(of_counted, "Qwen3-VL"),
    "llamagen": partial(of_counted, "LlamaGen"),
}
TEXT = [name for name in MODELS if name != "llamagen"]


def target_of(name: str) -> CausalTarget:
    model = MODELS[name]()
    return LlamaGenTarget(model) if name == "llamagen" else adapt(model)


def per_layer(launches: Counter[str]) -> set[int]:
    """Numbers of launches of the kernels of which every layer has one."""
    products = launches["silu_mul"] + launches["gelu_mul"]
    return {launches["rotate_into_cache"], launches["add_rms_norm"], products}


def layers_of(target: CausalTarget) -> Any:
    return target.model.get_decoder().layers


def is_replaced(module: nn.Module) -> bool:
    return isinstance(vars(module).get("forward"), Confined)


def score(target: CausalTarget, taps: tuple[int, ...] = ()) -> tuple[Tensor, dict[int, Tensor], Counter[str]]:
    """Logits and hidden states of a draft of 5 nodes, and launches, on a simulated GPU."""
    rows = [[3, 1, 4, 1, 5], [9, 2]]
    if isinstance(target, LlamaGenTarget):
        rows = [[target.vocabulary + row[0], *row[1:]] for row in rows]
    prompts = [
        {"input_ids": torch.tensor([row]), "position_ids": torch.arange(len(row))[None]}
        if isinstance(target, LlamaGenTarget)
        else {"input_ids": torch.tensor([row])}
        for row in rows
    ]
    with torch.inference_mode(), SimulatedGPU() as gpu:
        state, _ = target.prefill(prompts, 64, taps)
        gpu.take()
        found = target.score(state, draft())
        counts = gpu.take().launches
        state.close()
    return found.logits, found.taps, counts


def draft() -> Draft:
    """Chains of 5 nodes in two rows."""
    return Tree.chain(torch.arange(10).view(2, 5), DraftKind.POINT)


@pytest.mark.parametrize("captured", [False, True])
@pytest.mark.parametrize("name", TEXT)
@pytest.mark.every(4)
def test_greedy_outputs_stay_the_same(name: str, captured: bool) -> None:
    expected = decode(target_of(name), PROMPTS, RandomTreeDrafter(6, 64), max_new_tokens=12)
    target = target_of(name)
    if captured:
        target.steps = CapturedForward(target.model, target._step)
    with SimulatedGPU() as gpu:
        found = decode(target, PROMPTS, RandomTreeDrafter(6, 64), max_new_tokens=12)
        counts = gpu.take()
    assert found.outputs == expected.outputs
    assert counts.captured > 0 if captured else counts.launches["rotate_into_cache"] > 0
    assert len(per_layer(counts.launches)) == 1


#: Launches of a layer, with merged projections.
LAYERS = {"Llama": 11, "LlamaGen": 11, "Qwen2.5-VL": 11, "Qwen3-VL": 11, "Gemma": 11, "Gemma 3": 13}


@pytest.mark.parametrize("family", [*LAYERS, "Chameleon"])
@pytest.mark.every(3)
def test_launches_of_a_captured_layer(family: str) -> None:
    assert count_layer(FAMILIES[family]) == LAYERS.get(family, 11)


@pytest.mark.parametrize("name", MODELS)
def test_logits_and_hidden_states_are_those_of_the_modules(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Bit for bit on a CPU, in which the kernels' torch forms run: attention is the same kernel in both."""
    monkeypatch.setattr(causal, "merge_projections", lambda modules: None)
    target = target_of(name)
    ours, hidden, launches = score(target, (0, 1, -1))
    assert per_layer(launches) == {len(layers_of(target))}
    assert not launches["rsqrt"] and not launches["index_copy_"] and not launches["native_layer_norm"]
    monkeypatch.setattr(target, "_fused", [])
    expected, states, plain = score(target, (0, 1, -1))
    assert plain["rsqrt"] and torch.equal(ours, expected)
    assert hidden.keys() == states.keys() == {0, 1, -1}
    assert all(torch.equal(hidden[tap], states[tap]) for tap in states)


@pytest.mark.parametrize("name", MODELS)
def test_merged_projections_give_the_logits_of_the_parts(name: str) -> None:
    target = target_of(name)
    merged, _, launches = score(target)
    target._fused = []
    expected, _, plain = score(target)
    products = launches["linear"] + launches["mm"] + launches["addmm"]
    assert plain["linear"] + plain["mm"] + plain["addmm"] - products == 3 * len(layers_of(target))
    torch.testing.assert_close(merged, expected, rtol=1e-4, atol=1e-5)


def test_modules_that_another_has_changed_stay_as_they_are() -> None:
    target = CausalTarget(tiny_llama())
    first, second = layers_of(target)
    calls: list[str] = []
    hook = first.post_attention_layernorm.register_forward_hook(lambda *_: calls.append("norm"))
    second.mlp.act_fn.register_forward_pre_hook(lambda *_: calls.append("act"))
    second.mlp.down_proj.register_forward_hook(lambda module, args, output: output * 1.5)
    own = second.input_layernorm.forward
    second.input_layernorm.forward = lambda x: 0.5 * own(x)
    with fused(target._fused, PACKED):
        assert not is_replaced(first) and is_replaced(first.post_attention_layernorm)
        assert is_replaced(second) and is_replaced(second.self_attn)
        assert not is_replaced(second.mlp) and not is_replaced(second.input_layernorm)
    ours, _, launches = score(target)
    assert launches["add_rms_norm"] == launches["silu_mul"] == 1
    # of 15 products three are merged into others in the first layer, two in the second
    assert launches["linear"] == 15 - 3 - 2
    assert calls.count("norm") == calls.count("act") == 3  # two prefills and a draft
    target._fused = []
    assert torch.equal(score(target)[0], ours)
    hook.remove()
    assert len(find_fused(target.model)) > 0


@pytest.mark.parametrize("where", ["act_fn", "post_attention_layernorm"])
def test_parts_of_other_classes_keep_the_module(where: str) -> None:
    target = CausalTarget(tiny_llama())
    layer = layers_of(target)[0]
    if where == "act_fn":
        layer.mlp.act_fn = nn.GELU()
    else:
        layer.post_attention_layernorm = nn.RMSNorm(32)
    owner = layer.mlp if where == "act_fn" else layer
    with fused(target._fused, PACKED):
        assert not is_replaced(owner) and is_replaced(layers_of(target)[1].mlp)


@pytest.mark.parametrize("mask", [None, PACKED.bool(), PACKED.float(), {"full_attention": PACKED.float()}])
def test_nothing_is_replaced_unless_the_kernel_scores(mask: object) -> None:
    target = CausalTarget(tiny_llama())
    with fused(target._fused, mask):
        assert not any(is_replaced(module) for module in target.model.modules())


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_norms_and_feed_forward_networks_give_the_bits_of_the_module(name: str, dtype: torch.dtype) -> None:
    model = MODELS[name]().to(dtype).get_decoder()
    seen = set()
    for module, make, _ in find_fused(model):
        kind = FUSED[type(module).__name__]
        if kind in (fused_norm, fused_feed_forward):
            width = module.weight.shape[0] if kind is fused_norm else 32
            x = torch.randn(2, 3, width, generator=torch.Generator().manual_seed(0)).to(dtype)
            assert torch.equal(make(module.forward)(x), module(x))
        seen.add(kind)
    assert {fused_norm, fused_attention, fused_feed_forward} < seen and len(seen) == 4


@pytest.mark.parametrize("name", ["qwen3", "chameleon", "gemma3"])
def test_norms_of_heads_with_hooks_are_called(name: str) -> None:
    target = target_of(name)
    attention = layers_of(target)[0].self_attn
    attention.k_norm.register_forward_hook(lambda module, args, output: output * 1.5)
    ours, _, _ = score(target)
    target._fused = []
    torch.testing.assert_close(ours, score(target)[0], rtol=1e-4, atol=1e-5)
