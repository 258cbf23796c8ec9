"""Linear layers on a CPU: three implementations of the same product, in a `with` block."""

from __future__ import annotations

import copy
import gc
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import linear

import mmspec
from mmspec.core.draft import DraftKind, Tree
from mmspec.core.plain import NoDrafter
from mmspec.errors import InputError
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.models import free_memory, linear_layers
from mmspec.models.linear_layers import LinearLayers, Packing, Product, Way, bucket, fastest, packing_of
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.targets import CausalTarget
from tests.contracts.running import decode
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_llama

CPU = torch.device("cpu")
pytestmark = pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="no oneDNN packs weights")


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Way:
    """Compute layers of any size in one way, or as torch does if they cannot be packed."""
    chosen: Way = getattr(request, "param", Way.PACKED)
    monkeypatch.setattr(linear_layers, "LEAST_WEIGHTS", 0)

    def choose(rows: int, size: int, dtype: torch.dtype, threads: int, packs: bool) -> Way:
        return chosen if packs or chosen is not Way.PACKED else Way.TORCH

    monkeypatch.setattr(linear_layers, "fastest", choose)
    return chosen


BOTH = pytest.mark.parametrize("way", [Way.TRANSPOSED, Way.PACKED], indirect=True, ids=lambda way: way.value)


@pytest.fixture
def free(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Set the free memory in bytes, which later packing reduces."""
    monkeypatch.setattr(linear_layers, "PACKED", WeakValueDictionary())

    def set_free(count: int) -> None:
        def left(device: torch.device) -> int:
            return count - sum(each.nbytes for each in linear_layers.PACKED.values())

        monkeypatch.setattr(linear_layers, "free_bytes", left)

    return set_free


@torch.inference_mode()
def product_of(layer: nn.Linear, x: Tensor, packing: Packing | None = None) -> Tensor:
    return Product(packing or Packing())(x, layer.weight, layer.bias)


@BOTH
@pytest.mark.parametrize("bias", [False, True])
def test_outputs_are_those_of_the_layer(way: Way, bias: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    layer = nn.Linear(24, 40, bias=bias)
    for rows in range(1, 40):
        x = torch.randn(rows, 24, generator=generator)
        expected = layer(x).detach()
        for given in (x, x.T.contiguous().T, x[None], x.view(rows, 1, 24), x.repeat(1, 2)[:, :24]):
            found = product_of(layer, given)
            assert found.is_contiguous()
            torch.testing.assert_close(found, expected.view(found.shape), atol=1e-5, rtol=1e-5)


def test_the_fastest_way_is_that_which_was_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are packed if drafts become faster, and used unless another way is clearly faster."""
    torch_, transposed, packed = Way.TORCH, Way.TRANSPOSED, Way.PACKED
    known = {rows: {torch_: 2.0, transposed: 1.5, packed: 1.0} for rows in linear_layers.BUCKETS}
    known[1] = {torch_: 1.0, transposed: 0.5, packed: 0.9}
    known[2] = {torch_: 1.0, transposed: 0.99, packed: 1.05}
    monkeypatch.setattr(linear_layers, "measure", lambda size, dtype, threads: known)

    def chosen(rows: int, packs: bool = True) -> Way:
        fastest.cache_clear()
        return fastest(rows, 24, torch.float32, 1, packs)

    assert [chosen(rows) for rows in (1, 2, 4)] == [transposed, packed, packed]
    assert [chosen(rows, packs=False) for rows in (1, 2, 4)] == [transposed, torch_, transposed]
    for rows in linear_layers.BUCKETS:
        known[rows][packed] = 1.9  # not enough for a second copy
    assert [chosen(rows) for rows in (1, 2, 4)] == [transposed, torch_, transposed]
    del known[4][transposed], known[4][packed]  # a machine that can do neither
    assert chosen(4, packs=False) is torch_
    fastest.cache_clear()


def test_every_way_is_measured_at_every_number_of_rows() -> None:
    seconds = linear_layers.measure(288, torch.float32, torch.get_num_threads())
    assert tuple(seconds) == linear_layers.BUCKETS
    assert all(0 < taken < 1 for found in seconds.values() for taken in found.values())
    assert set(seconds[4]) == set(Way) and set(seconds[256]) == {Way.TORCH, Way.PACKED}
    assert [bucket(rows) for rows in (1, 2, 3, 9, 64, 65, 999)] == [1, 2, 4, 16, 64, 256, 256]
    assert linear_layers.measure(288, torch.float32, torch.get_num_threads()) is seconds  # once in a process


@pytest.mark.parametrize("error", [RuntimeError("no bf16 on this processor"), AttributeError("no oneDNN")])
def test_a_machine_without_packed_weights_is_not_asked_for_them(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(weight: Tensor) -> Tensor:
        raise error

    monkeypatch.setattr(linear_layers, "pack", refuse)
    found = linear_layers.measure.__wrapped__(288, torch.float32, 1)
    assert all(Way.PACKED not in each for each in found.values())


@BOTH
def test_layers_are_fast_for_a_while(way: Way) -> None:
    """Except for layers of another dtype, and layers with a replaced forward function or weight."""

    def of_others(x: Tensor) -> Tensor:
        return x

    normed = torch.nn.utils.weight_norm(nn.Linear(8, 8))
    model = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8, dtype=torch.float64), nn.Linear(8, 8), normed])
    model[2].forward = of_others
    x = torch.randn(4, 8)
    computing = LinearLayers([model], Packing())
    with torch.inference_mode(), computing():
        assert "forward" in vars(model[0]) and "forward" not in vars(normed)
        torch.testing.assert_close(model[0](x), linear(x, model[0].weight, model[0].bias))
        assert torch.equal(model[1](x.double()), linear(x.double(), model[1].weight, model[1].bias))
        assert model[2](x) is x
    assert "forward" not in vars(model[0]) and model[2].forward is of_others
    with pytest.raises(ZeroDivisionError), computing():
        raise ZeroDivisionError
    assert "forward" not in vars(model[0])


def test_a_layer_of_two_contexts_is_fast_until_both_are_left(way: Way) -> None:
    model = nn.Sequential(nn.Linear(8, 8))
    one, other = LinearLayers([model], Packing()), LinearLayers([model[0]], Packing())
    with one():
        with other(), one():
            pass
        assert "forward" in vars(model[0])
    assert "forward" not in vars(model[0])


@BOTH
@pytest.mark.parametrize("drafter", [NoDrafter(), CopyDrafter(4)], ids=["none", "copy"])
def test_greedy_output_is_that_of_generate(way: Way, drafter: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts, scored drafts and plain steps are all computed so."""
    seen: list[int] = []
    name = "packed_product" if way is Way.PACKED else "transposed_product"
    product = getattr(linear_layers, name)

    def noted(x: Tensor, *rest: Any) -> Tensor:
        seen.append(len(x))
        found: Tensor = product(x, *rest)
        return found

    monkeypatch.setattr(linear_layers, name, noted)
    model = tiny_llama()
    prompt = [3, 1, 4, 1, 5, 3, 1, 4]
    ids = torch.tensor([prompt])
    told = model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=16, do_sample=False)
    assert not seen
    found = decode(CausalTarget(model), [prompt], drafter, max_new_tokens=16).outputs
    assert found == [told[0, len(prompt) :].tolist()]
    assert (
        {len(prompt), 1} <= set(seen)
        and (max(seen) > 1)
        and bool({2, 3, 4, 5} & set(seen)) == (not isinstance(drafter, NoDrafter))
    )


def added(weight: nn.Parameter) -> None:
    with torch.no_grad():
        weight.add_(1.0)


def merged(weight: nn.Parameter) -> None:
    weight.data += 1.0  # as peft merges adapters: torch counts no write


def replaced(weight: nn.Parameter) -> None:
    weight.data = weight.data + 1.0


@pytest.mark.parametrize("change", [added, merged, replaced], ids=lambda change: change.__name__)
def test_weights_that_change_are_packed_again_in_the_next_call(
    way: Way, change: Callable[[nn.Parameter], None]
) -> None:
    layer, x = nn.Linear(8, 8), torch.ones(4, 8)
    computing = LinearLayers([layer], Packing())
    with torch.inference_mode(), computing():
        before = layer(x)
    change(layer.weight)
    with torch.inference_mode(), LinearLayers([layer], Packing())():
        torch.testing.assert_close(layer(x), before + 8.0)
        assert linear_layers.PACKED[id(layer.weight)].is_current(layer.weight)


def test_a_weight_that_changes_while_a_call_runs_is_not_packed_in_it_again(
    way: Way, monkeypatch: pytest.MonkeyPatch
) -> None:
    layer, x, packed = nn.Linear(8, 8), torch.ones(4, 8), list[Tensor]()
    pack = linear_layers.pack
    monkeypatch.setattr(linear_layers, "pack", lambda weight: (packed.append(weight), pack(weight))[1])
    with torch.inference_mode(), LinearLayers([layer], Packing())():
        before = layer(x)
        for times in (1, 2):
            layer.weight.add_(1.0)
            torch.testing.assert_close(layer(x), before + 8.0 * times)
    assert len(packed) == 1


def test_models_that_learnt_or_were_loaded_into_are_packed_anew(way: Way) -> None:
    model, other = tiny_llama(), tiny_llama(seed=1)
    prompt = [3, 1, 4, 1, 5]
    target = CausalTarget(model)
    first = decode(target, [prompt], NoDrafter(), max_new_tokens=8).outputs
    model.load_state_dict(other.state_dict())
    second = decode(target, [prompt], NoDrafter(), max_new_tokens=8).outputs
    assert second == decode(CausalTarget(other), [prompt], NoDrafter(), max_new_tokens=8).outputs != first


def test_gradients_and_autocast_are_torchs(way: Way) -> None:
    layer, x = nn.Linear(8, 8), torch.ones(4, 8)
    with LinearLayers([layer], Packing())():
        layer(x).sum().backward()
        with torch.inference_mode(), torch.autocast("cpu", torch.bfloat16):
            assert layer(x).dtype == torch.bfloat16
    torch.testing.assert_close(layer.weight.grad, torch.full((8, 8), 4.0))
    assert id(layer.weight) not in linear_layers.PACKED


def test_packed_weights_stay_within_their_share_of_the_memory(way: Way, free: Callable[[int], None]) -> None:
    layers = [nn.Linear(16, 16, bias=False) for _ in range(4)]  # of 1,024 bytes each
    x = torch.randn(4, 16)

    def packed(share: float) -> int:
        with torch.inference_mode(), LinearLayers(layers, Packing(share))():
            for layer in layers:
                torch.testing.assert_close(layer(x), linear(x, layer.weight))
        return sum(id(layer.weight) in linear_layers.PACKED for layer in layers)

    free(4096 + 1023)
    assert packed(0.5) == 2
    assert packed(1.0) == 4
    assert packed(0.0) == 0
    free(1023)
    assert packed(1.0) == 0


def test_copies_are_shared_and_freed(way: Way) -> None:
    model = tiny_llama()
    weights = [each.weight for each in model.modules() if type(each) is nn.Linear]
    known = set(linear_layers.PACKED)

    def kept() -> int:
        gc.collect()
        return len(set(linear_layers.PACKED) - known)

    prompt, how = [[3, 1, 4, 1, 5]], {"max_new_tokens": 4}
    decode(CausalTarget(model), prompt, NoDrafter(), **how)  # type: ignore[arg-type]
    assert kept() == len({id(weight) for weight in weights})
    first = dict(linear_layers.PACKED)
    decode(CausalTarget(model), prompt, NoDrafter(), **how)  # type: ignore[arg-type]
    assert all(linear_layers.PACKED[key] is copy for key, copy in first.items())
    del first
    mmspec.enable(model, "copy")
    mmspec.disable(model)
    assert kept() == 0
    decode(CausalTarget(model), prompt, NoDrafter(), **how)  # type: ignore[arg-type]
    assert kept()
    del model, weights
    assert kept() == 0


def test_copied_models_are_computed_by_their_own_weights(way: Way) -> None:
    model, x = nn.Sequential(nn.Linear(8, 8)), torch.ones(4, 8)
    with torch.no_grad(), LinearLayers([model], Packing())():
        told = model(x)
        copies = copy.deepcopy(model), pickle.loads(pickle.dumps(model))
    for each in copies:
        with torch.no_grad():
            each[0].weight.add_(1.0)
            torch.testing.assert_close(each(x), told + 8.0)
        with torch.inference_mode(), LinearLayers([each], Packing())():
            torch.testing.assert_close(each(x), told + 8.0)
        assert "forward" not in vars(each[0])


@BOTH
def test_compiled_code_computes_layers_in_that_way(way: Way) -> None:
    model, x = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 4, bias=False)), torch.randn(3, 8)
    expected = model(x).detach()
    compiled = torch.compile(model, backend="aot_eager", fullgraph=True)
    with torch.inference_mode(), LinearLayers([model], Packing())():
        torch.testing.assert_close(compiled(x), expected)
    assert all((id(model[at].weight) in linear_layers.PACKED) == (way is Way.PACKED) for at in (0, 2))
    with torch.inference_mode():
        torch.testing.assert_close(compiled(x), expected)


def test_scored_drafts_are_those_of_torch(way: Way) -> None:
    target = CausalTarget(tiny_llama())
    state, _ = target.prefill([{"input_ids": torch.tensor([[3, 1, 4, 1, 5]])}], 16)
    draft = Tree.chain(torch.tensor([[9, 2, 6]]), DraftKind.POINT)
    expected = target.score(state, draft).logits
    assert not {id(each.weight) for each in target.model.modules() if type(each) is nn.Linear} & set(
        linear_layers.PACKED
    )
    with torch.inference_mode(), target.computing()():
        torch.testing.assert_close(target.score(state, draft).logits, expected)


def test_users_switch_packing_off(way: Way) -> None:
    model = tiny_llama()
    ids = torch.tensor([[3, 1, 4, 1, 5]])
    weight = model.get_output_embeddings().weight
    mmspec.enable(model, "copy", pack=False)
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert id(weight) not in linear_layers.PACKED
    mmspec.disable(model)
    mmspec.enable(model, "copy")
    model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=4, do_sample=False)
    assert id(weight) in linear_layers.PACKED
    pipe = VisionLanguagePipeline(*VISION_LANGUAGE_FAMILIES["qwen2_5_vl"](), accelerator="none")
    model = pipe.model
    assert packing_of(model).share == linear_layers.SHARE
    pipe.disable_packing()
    assert packing_of(model).share == 0.0
    pipe.enable_packing(0.25)
    assert pipe.target.packing.share == 0.25
    for share in (-0.1, 2, "all"):
        with pytest.raises(InputError, match="share"):
            pipe.enable_packing(share)  # type: ignore[arg-type]


def test_free_memory_is_that_of_the_container(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "CGROUP", tmp_path)
    whole = free_memory.free_bytes(CPU)
    assert 0 < whole < 2**50
    (tmp_path / "memory.current").write_text("1000\n")
    (tmp_path / "memory.stat").write_text("anon 600\ninactive_file 300\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert free_memory.free_bytes(CPU) > 2**20
    (tmp_path / "memory.max").write_text("1500\n")
    assert free_memory.free_bytes(CPU) == 800


def test_free_memory_of_a_gpu_is_what_torch_holds_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (100, 1000))
    monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 50)
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 20)
    assert free_memory.free_bytes(torch.device("cuda")) == 130
