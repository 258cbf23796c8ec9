"""Merged projections: what moves, what stays, and that everyone else sees the same model."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
import transformers as hf
from torch import Tensor, nn
from torch.nn.utils import parametrizations

from mmspec.targets import merged
from mmspec.targets.merged import GATE_UP, QUERY_KEY_VALUE, adjacent, merge_projections, project
from tests.tiny_models import randomise, tiny_llama

X = torch.randn(2, 5, 32, generator=torch.Generator().manual_seed(0))


def with_biases() -> Any:
    """A Qwen2, whose queries, keys and values have biases."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "vocab_size": 64}
    config = hf.Qwen2Config(**sizes, num_attention_heads=4, num_key_value_heads=2)
    return randomise(hf.Qwen2ForCausalLM(config), 3).eval()


def merge(model: nn.Module) -> nn.Module:
    with torch.inference_mode():  # as a prefill does
        merge_projections(model.modules())
    return model


def groups(model: Any) -> list[tuple[nn.Module, tuple[str, ...]]]:
    layers = model.get_decoder().layers
    return [
        *((layer.self_attn, QUERY_KEY_VALUE) for layer in layers),
        *((layer.mlp, GATE_UP) for layer in layers),
    ]


def weights(module: nn.Module, names: tuple[str, ...]) -> list[Tensor]:
    return [getattr(module, name).weight for name in names]


def is_merged(module: nn.Module, names: tuple[str, ...]) -> bool:
    return adjacent(weights(module, names)) is not None


def memory_of(model: nn.Module) -> int:
    """Bytes of all memory that parameters hold."""
    held = {each.untyped_storage().data_ptr(): each.untyped_storage().nbytes() for each in model.parameters()}
    return sum(held.values())


def logits(model: Any) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.arange(12)[None]).logits
    return found


@pytest.mark.parametrize("make", [tiny_llama, with_biases])
def test_parameters_become_views_of_one_tensor(make: Callable[[], Any]) -> None:
    model, own = make(), make()
    before, size = {name: id(each) for name, each in model.named_parameters()}, memory_of(model)
    merge(model)
    assert all(is_merged(*group) for group in groups(model))
    assert memory_of(model) == size  # nothing is held twice
    assert {name: id(each) for name, each in model.named_parameters()} == before
    assert not any(each.is_inference() for each in model.parameters())
    states = own.state_dict()
    assert all(torch.equal(each, states[name]) for name, each in model.state_dict().items())
    assert torch.equal(logits(model), logits(own))
    for module, names in groups(model):
        found = project(module, names, X)
        parts = [getattr(module, name)(X) for name in names]
        assert all(torch.allclose(a, b, atol=1e-6) for a, b in zip(found, parts, strict=True))
        assert found[0].untyped_storage().data_ptr() == found[1].untyped_storage().data_ptr()


def test_saving_and_loading(tmp_path: Path) -> None:
    model, other = merge(tiny_llama()), tiny_llama()
    randomise(other, 9)
    for parameter in other.parameters():
        parameter.data += 1.0
    model.save_pretrained(tmp_path / "whole")  # type: ignore[operator]
    assert torch.equal(logits(type(other).from_pretrained(tmp_path / "whole")), logits(model))
    torch.save(model.state_dict(), tmp_path / "states.pt")
    kept = sum(each.nbytes for each in model.state_dict().values())
    assert (tmp_path / "states.pt").stat().st_size < kept + 40_000
    expected = logits(other)
    model.load_state_dict(other.state_dict())
    assert all(is_merged(*group) for group in groups(model))  # loaded in place
    assert torch.equal(logits(model), expected)


def test_training_moves_the_merged_weights() -> None:
    model = merge(tiny_llama().requires_grad_(True))
    module, names = groups(model)[0]
    before = project(module, names, X)[1].detach().clone()
    step = torch.optim.SGD(model.parameters(), 0.5)
    model(torch.arange(12)[None], labels=torch.arange(12)[None]).loss.backward()
    step.step()
    after = project(module, names, X)[1].detach()
    assert is_merged(module, names) and not torch.equal(before, after)
    torch.testing.assert_close(after, module.k_proj(X).detach())


@pytest.mark.parametrize("part", [copy.deepcopy, lambda model: model.double()], ids=["copied", "cast"])
def test_weights_that_came_apart_are_read_from_the_modules(part: Callable[[Any], Any]) -> None:
    model = part(merge(tiny_llama()))
    for module, names in groups(model):
        assert not is_merged(module, names)
        x = X.to(module.down_proj.weight.dtype if names == GATE_UP else module.o_proj.weight.dtype)
        found = project(module, names, x)
        parts = [getattr(module, name)(x) for name in names]
        assert all(torch.equal(a, b) for a, b in zip(found, parts, strict=True))


def quantised(model: Any) -> None:
    class Packed(nn.Linear):
        """Stands for the layers of bitsandbytes and others, which are of other classes."""

    layer = model.get_decoder().layers[0].self_attn
    layer.k_proj.__class__ = Packed


def adapted(model: Any) -> None:
    settings = peft.LoraConfig(
        r=2, target_modules=["k_proj"], layers_to_transform=[0], init_lora_weights=False
    )
    peft.inject_adapter_in_model(settings, model)


def hooked(model: Any) -> None:
    layer = model.get_decoder().layers[0].self_attn
    layer.k_proj.register_forward_hook(lambda module, args, output: 2 * output)


def offloaded(model: Any) -> None:
    from accelerate import cpu_offload

    cpu_offload(model.get_decoder().layers[0].self_attn, torch.device("cpu"))


def replaced(model: Any) -> None:
    layer = model.get_decoder().layers[0].self_attn.k_proj
    own = layer.forward
    layer.forward = lambda x: own(x) + 1


def normalised(model: Any) -> None:
    parametrizations.weight_norm(model.get_decoder().layers[0].self_attn.k_proj)


def tied(model: Any) -> None:
    layer = model.get_decoder().layers[0].self_attn
    layer.v_proj.weight = layer.k_proj.weight


def flat(model: Any) -> None:
    """One memory for several parameters, as FSDP and others keep it."""
    layer = model.get_decoder().layers[0].self_attn
    both = torch.cat([layer.k_proj.weight.detach(), layer.o_proj.weight.detach()])
    layer.k_proj.weight.data, layer.o_proj.weight.data = both.split(
        [len(layer.k_proj.weight), len(both) - len(layer.k_proj.weight)]
    )


def mixed(model: Any) -> None:
    layer = model.get_decoder().layers[0].self_attn
    layer.k_proj.bias = nn.Parameter(torch.ones(len(layer.k_proj.weight)))


@pytest.mark.parametrize(
    "change", [quantised, adapted, hooked, offloaded, replaced, normalised, tied, flat, mixed]
)
def test_groups_with_anything_else_stay_apart(change: Callable[[Any], None]) -> None:
    model = tiny_llama()
    change(model)
    module, names = groups(model)[0]
    places = [each.data_ptr() for each in module.parameters()]
    expected = None if change is offloaded else [getattr(module, name)(X) for name in names]
    merge(model)
    assert [each.data_ptr() for each in module.parameters()] == places
    others = [is_merged(*group) for group in groups(model)[1:]]
    assert all(others) and len(others) == 3
    if expected is not None:
        found = project(module, names, X)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("change", [adapted, hooked, replaced])
def test_what_is_added_later_is_called(change: Callable[[Any], None]) -> None:
    model, own = merge(tiny_llama()), tiny_llama()
    for each in (model, own):
        torch.manual_seed(1)
        change(each)
    (module, names), (other, _) = groups(model)[0], groups(own)[0]
    found, expected = project(module, names, X), [getattr(other, name)(X) for name in names]
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))


def test_without_memory_for_a_copy_nothing_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(merged, "free_bytes", lambda device: 5000)
    model = merge(tiny_llama())
    assert not any(is_merged(*group) for group in groups(model))
    monkeypatch.undo()
    merge(model)  # graphs may hold the addresses by now
    assert not any(is_merged(*group) for group in groups(model))


def test_neighbours_in_memory_alone_are_no_merged_weights() -> None:
    whole = torch.arange(24.0).view(6, 4)
    assert torch.equal(adjacent([whole[:2], whole[2:3], whole[3:]]), whole)  # type: ignore[arg-type]
    for apart in ([whole[:2], whole[3:]], [whole[2:], whole[:2]], [whole[:2], whole[2:].clone()]):
        assert adjacent(apart) is None
    assert adjacent([whole.T[:2], whole.T[2:]]) is None
    assert adjacent([whole[:2], whole[2:4].view(4, 2)]) is None
    assert adjacent([whole[:2], None]) is None
