"""Adapters, weights, hooks and options of modules change the keys of an unchanged prompt."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspec.accelerators import build_accelerator
from mmspec.targets import CausalTarget
from mmspec.targets.hooks import is_of_library
from mmspec.targets.model_state import state_of
from mmspec.targets.prefix import PrefixCache
from tests.contracts.running import decode
from tests.tiny_models import tiny_llama

peft = pytest.importorskip("peft")
PROMPT = torch.arange(3, 23)[None]


@dataclass
class Strength:
    """Settings of a steering module, in an object beside its weights."""

    scale: float = 0.0
    direction: Tensor = field(default_factory=lambda: torch.linspace(-1, 1, 32))


class Steered(nn.Module):
    """A layer of a decoder whose output is pushed, as steering libraries wrap it."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer, self.strength = layer, Strength()

    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        pushed: Tensor = self.layer(*args, **kwargs) + self.strength.scale * self.strength.direction
        return pushed


def adapted() -> tuple[CausalTarget, Any]:
    """A target with an empty prefix cache, and its model with two adapters, of which the first acts."""
    torch.manual_seed(0)  # of the adapters' weights
    model = tiny_llama()
    model.model.layers[0] = Steered(model.model.layers[0])
    target = CausalTarget(model)
    config = peft.LoraConfig(
        r=4, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False, lora_alpha=16
    )
    wrapped = peft.get_peft_model(model, config, "one").eval()
    wrapped.add_adapter("two", config)
    target.prefix_cache = PrefixCache(2**30, block=1)
    return target, wrapped


def scale(target: CausalTarget, wrapped: Any) -> None:
    for module in wrapped.modules():
        if isinstance(getattr(module, "scaling", None), dict):
            module.scaling["one"] = 0.5


def push(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output + 1


@torch.no_grad()
def switch_off_gradients_and_push(module: nn.Module, args: tuple[Any, ...], output: Tensor) -> Tensor:
    return output + 1  # wrapped by torch, whose own this function is not


def patch(target: CausalTarget, wrapped: Any) -> None:
    layer = target.model.model.layers[0].layer.mlp
    forward = layer.forward
    layer.forward = functools.wraps(forward)(lambda hidden: 2 * forward(hidden))


def average(target: CausalTarget, wrapped: Any) -> None:
    for weight in target.model.parameters():
        weight.data.mul_(torch.linspace(0.5, 1.5, weight.shape[-1]))


def turn_faster(target: CausalTarget, wrapped: Any) -> None:
    target.model.model.rotary_emb.inv_freq.data.mul_(2)


def steer(target: CausalTarget, wrapped: Any) -> None:
    target.model.model.layers[0].strength.scale = 2.0


def steer_elsewhere(target: CausalTarget, wrapped: Any) -> None:
    steer(target, wrapped)
    target.model.model.layers[0].strength.direction.data.neg_()


def attend_evenly(target: CausalTarget, wrapped: Any) -> None:
    target.model.model.layers[0].layer.self_attn.scaling = 0.01


CHANGES: dict[str, Callable[[CausalTarget, Any], Any]] = {
    "another adapter": lambda target, wrapped: wrapped.set_adapter("two"),
    "no adapter": lambda target, wrapped: wrapped.base_model.disable_adapter_layers(),
    "a merged adapter": lambda target, wrapped: wrapped.merge_adapter(),
    "an adapter of another scale": scale,
    "a hook": lambda target, wrapped: target.model.model.layers[0].register_forward_hook(push),
    "a decorated hook": lambda target, wrapped: target.model.model.layers[0].register_forward_hook(
        switch_off_gradients_and_push
    ),
    "another forward": patch,
    "weights written past their counter": average,
    "a buffer": turn_faster,
    "an option in an object": steer,
    "a tensor in an object": steer_elsewhere,
    "an option of a module": attend_evenly,
}


def read(target: CausalTarget) -> tuple[list[Tensor], int]:
    """Keys and values of the prompt in all layers, and how many of its tokens were known."""
    with torch.inference_mode():
        state, output = target.prefill([{"input_ids": PROMPT}], 32)
    states = state.cache.row_states(0, PROMPT.shape[1])
    return [tensor.clone() for pair in states.values() for tensor in pair], output.cached_tokens


@pytest.mark.parametrize("change", CHANGES)
def test_a_model_that_was_changed_reads_its_prompt_anew(change: str) -> None:
    target, wrapped = adapted()
    before, _ = read(target)
    assert read(target)[1] == PROMPT.shape[1] - 1
    CHANGES[change](target, wrapped)
    found, known = read(target)
    cache, target.prefix_cache = target.prefix_cache, None
    expected, _ = read(target)
    assert all(map(torch.equal, found, expected)) and known == 0
    assert not all(map(torch.allclose, before, expected)), "this change does change the keys"
    assert cache is not None


def test_an_adapter_that_comes_back_finds_its_own_keys() -> None:
    target, wrapped = adapted()
    first, _ = read(target)
    wrapped.set_adapter("two")
    second, _ = read(target)
    for name, expected in (("one", first), ("two", second)):
        wrapped.set_adapter(name)
        found, known = read(target)
        assert known == PROMPT.shape[1] - 1
        for ours, theirs in zip(found, expected, strict=True):  # its last token was read by itself
            torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


def test_while_a_hook_is_set_nothing_is_kept_and_then_all_is_known_again() -> None:
    target, _ = adapted()
    read(target)
    hook = nn.modules.module.register_module_forward_hook(lambda *_: None)
    try:
        assert state_of(target.model) is None and read(target)[1] == 0
    finally:
        hook.remove()
    assert read(target)[1] == PROMPT.shape[1] - 1 and len(target.prefix_cache) == PROMPT.shape[1]  # type: ignore[arg-type]


def test_what_libraries_set_on_a_model_changes_nothing() -> None:
    """Attributes of `generate`, collected hidden states, accelerate and PyTorch do not change the keys."""
    accelerate = pytest.importorskip("accelerate")
    target, _ = adapted()
    read(target)
    target.model.generate(PROMPT, max_new_tokens=2, output_hidden_states=True, return_dict_in_generate=True)
    with torch.inference_mode():
        state, _ = target.prefill([{"input_ids": PROMPT}], 32, (0, -1))  # its hooks stay until it is closed
    assert read(target)[1] == PROMPT.shape[1] - 1
    state.close()
    layer = nn.Linear(2, 2)
    accelerate.hooks.add_hook_to_module(layer, accelerate.hooks.AlignDevicesHook("cpu"))
    assert is_of_library(layer.forward) and is_of_library(functools.partial(nn.functional.relu))
    assert not is_of_library(push) and not is_of_library(switch_off_gradients_and_push)


def test_a_draft_model_that_was_changed_reads_its_prompt_anew() -> None:
    """Otherwise its drafts would be worse, without an effect on the output."""
    draft, wrapped = adapted()
    target = CausalTarget(tiny_llama())
    accelerator = build_accelerator("draft_model", model=draft).fit(target)

    def accepted() -> list[Any]:
        run = decode(target, PROMPT.tolist(), accelerator.drafter, accelerator.rule, max_new_tokens=24)
        return [run.outputs, run.stats.accepted_histogram]

    accepted()
    wrapped.base_model.disable_adapter_layers()
    found = accepted()
    draft.prefix_cache = None
    assert found == accepted()
