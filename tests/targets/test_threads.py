"""One model in several threads: while one thread decodes, others see an unchanged model.

The order is deterministic. A decoding thread stops inside a layer, while the other runs the model
and decodes with it.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

import mmspec
from mmspec.core.draft import DraftKind, Tree
from mmspec.models import linear_layers
from mmspec.models.linear_layers import LinearLayers, Packing, Way
from mmspec.models.replaced import Replacement, replaced_attention, replaced_forwards
from mmspec.targets import CausalTarget
from mmspec.targets.rotary import find_changing, turned
from mmspec.targets.thinned import attention_behind, reading_only
from tests.targets.test_rotary import DYNAMIC, llama
from tests.tiny_models import HYBRID_TEXT_MODELS, tiny_llama

IDS = torch.tensor([[3, 1, 4, 1, 5]])
LONG = torch.arange(1, 49)[None] % 60


@pytest.fixture(autouse=True)
def packs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small layers are computed by packed weights too."""
    monkeypatch.setattr(linear_layers, "LEAST_WEIGHTS", 0)
    monkeypatch.setattr(linear_layers, "fastest", lambda *kind: Way.PACKED)


def elsewhere(function: Callable[[], Any]) -> Any:
    """Call a function in a thread of its own."""
    found: list[Any] = []
    thread = threading.Thread(target=lambda: found.append(function()))
    thread.start()
    thread.join()
    return found[0]


@torch.no_grad()
def read(model: PreTrainedModel, ids: Tensor = IDS) -> Tensor:
    given = {
        "inputs_embeds": model.get_input_embeddings()(ids),
        "position_ids": torch.arange(ids.shape[1])[None],
    }
    logits: Tensor = model(**given, use_cache=False).logits
    return logits


def say(model: Any, ids: Tensor = IDS, count: int = 8) -> list[int]:
    mask = torch.ones_like(ids)
    found = model.generate(input_ids=ids, attention_mask=mask, max_new_tokens=count, do_sample=False)
    words: list[int] = found[0].tolist()
    return words


def parts(model: nn.Module) -> dict[str, Any]:
    """Return the attributes of every module of a model, by name."""
    return {
        f"{path}.{name}": {key: id(part) for key, part in held.items()}
        if isinstance(held, dict)
        else id(held)
        for path, module in model.named_modules()
        for name, held in vars(module).items()
        if name not in ("_mmspec_enabled", "training")
    }


def stopping(
    model: PreTrainedModel, work: Callable[[], Any], meanwhile: Callable[[], None], times: int
) -> Any:
    """Do some work in a thread that stops in the first layer, in so many forwards; return what it gave.

    Args:
        model: whose first layer it is.
        work: done in the other thread.
        meanwhile: done here, each time that the other thread has stopped.
        times: how often it stops; more forwards of the layer do not.
    """
    layer = model.get_decoder().layers[0]
    plain, found = type(layer), list[Any]()
    arrived, go = threading.Semaphore(0), threading.Semaphore(0)
    left = iter(range(times))

    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if threading.current_thread() is thread and next(left, None) is not None:
            arrived.release()
            assert go.acquire(timeout=60)
        return plain.forward(self, *args, **kwargs)

    thread = threading.Thread(target=lambda: found.append(work()), daemon=True)
    layer.__class__ = type(plain.__name__, (plain,), {"forward": forward, "__module__": plain.__module__})
    thread.start()
    for _ in range(times):
        assert arrived.acquire(timeout=60)
        try:
            meanwhile()
        finally:
            go.release()
    thread.join()
    layer.__class__ = plain
    return found[0]


MODELS: dict[str, tuple[Callable[[], PreTrainedModel], str]] = {
    "linear layers": (tiny_llama, "copy"),
    "changing frequencies": (partial(llama, DYNAMIC, 32), "copy"),
    "mixers in closed form": (HYBRID_TEXT_MODELS["qwen3_5"], "copy"),
    "mixers in turn": (HYBRID_TEXT_MODELS["jamba"], "copy"),
}


@pytest.mark.parametrize("name", MODELS)
def test_two_threads_decode_with_one_model_and_run_it_plainly(name: str) -> None:
    """One stops inside its prefill, its drafts and the forwards that verify."""
    build, accelerator = MODELS[name]
    model, ids = build(), (LONG if name == "changing frequencies" else IDS)
    wanted, fresh, logits = say(model, ids), copy.deepcopy(model), read(model)
    before = parts(model)
    mmspec.enable(model, accelerator)

    def meanwhile() -> None:
        assert torch.equal(read(model), logits)
        assert torch.equal(read(copy.deepcopy(model)), logits)
        assert say(model, ids) == wanted

    assert stopping(model, lambda: say(model, ids), meanwhile, times=4) == wanted
    assert mmspec.summary(model)[0].calls == 5
    mmspec.disable(model)
    assert parts(model) == before
    assert say(model, ids) == wanted == say(fresh, ids)


def decoder_of(model: PreTrainedModel) -> nn.Module:
    decoder: nn.Module = model.get_decoder()
    return decoder


CONTEXTS: dict[str, tuple[Callable[[], PreTrainedModel], Callable[[Any], AbstractContextManager[None]]]] = {
    "linear layers": (tiny_llama, lambda model: LinearLayers([model], Packing())()),
    "some places": (tiny_llama, lambda model: reading_only(decoder_of(model), torch.tensor([0, 4]))),
    "frequencies": (partial(llama, DYNAMIC, 4), lambda model: turned(find_changing(model), one_by_one=True)),
    "attention": (
        tiny_llama,
        lambda model: replaced_attention(lambda own: lambda m, q, *_, **__: (q * 0, None)),
    ),
}


@pytest.mark.parametrize("name", CONTEXTS)
def test_what_one_forward_computes_otherwise_others_do_not(name: str) -> None:
    """Also if the first thread finishes first; nothing remains when all have finished."""
    build, context = CONTEXTS[name]
    model = build()
    logits, before = read(model), parts(model)
    with context(model):
        assert torch.equal(elsewhere(lambda: read(model)), logits)
        otherwise = read(model)
    assert name == "linear layers" or not torch.equal(otherwise, logits)
    assert parts(model) == before
    entered, left = threading.Barrier(2), threading.Event()
    found: list[Tensor] = []

    def later() -> None:
        entered.wait(60)
        with context(model):
            entered.wait(60)
            assert left.wait(60)
            found.append(read(model))

    thread = threading.Thread(target=later)
    thread.start()
    with context(model):
        entered.wait(60)
        entered.wait(60)
    assert torch.equal(read(model), logits)
    left.set()
    thread.join()
    assert torch.equal(found[0], otherwise)
    assert parts(model) == before


def test_attention_is_read_without_a_change_that_others_see() -> None:
    model = tiny_llama()
    target, logits, before = CausalTarget(model), read(model), parts(model)
    state, _ = target.prefill([{"input_ids": IDS}], 16)
    alone = attention_behind(target, state, torch.tensor([[9]]))

    def meanwhile() -> None:
        assert torch.equal(read(model), logits)
        assert model.config._attn_implementation == "sdpa"
        CausalTarget(model)

    found = stopping(model, lambda: attention_behind(target, state, torch.tensor([[9]])), meanwhile, times=1)
    assert torch.equal(found, alone)
    assert parts(model) == before


def test_hidden_states_are_those_of_the_forward_that_asks() -> None:
    model = tiny_llama()
    target = CausalTarget(model)
    state, _ = target.prefill([{"input_ids": IDS}], 16, taps=(1, -1))
    draft = Tree.chain(torch.tensor([[9, 2, 6]]), DraftKind.POINT)
    alone = target.score(state, draft).taps
    together = stopping(model, lambda: target.score(state, draft).taps, lambda: read(model), times=1)
    assert all(torch.equal(together[tap], alone[tap]) for tap in (1, -1))
    target.score(state, draft)
    elsewhere(lambda: read(model))
    assert not state.hidden.take()


def test_a_replacement_within_another_begins_from_it() -> None:
    layer = nn.Linear(2, 2)
    doubled = Replacement(layer, lambda own: lambda x: 2 * own(x))
    x = torch.ones(1, 2)
    plain = layer(x)
    with replaced_forwards([doubled]):
        with replaced_forwards([doubled]):
            assert torch.equal(layer(x), 4 * plain)
        assert torch.equal(layer(x), 2 * plain)
        with (
            pytest.raises(ZeroDivisionError),
            replaced_forwards([doubled, Replacement(layer, lambda own: 1 / 0)]),
        ):
            pass
        assert torch.equal(layer(x), 2 * plain)
        assert torch.equal(copy.deepcopy(layer)(x), plain)
    assert "forward" not in vars(layer)
