"""Layers of the target that draft (S2D, FiRST), compared with forward passes without a cache."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from mmspec.core.interfaces import Drafter
from mmspec.errors import InputError
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, TrainingExample
from mmspec_extras.methods.early_exit.adapters import Adapters
from mmspec_extras.methods.first.drafter import RoutedLayersDrafter
from mmspec_extras.methods.first.head import RoutedLayers, RoutedLayersConfig
from mmspec_extras.methods.first.loss import RoutedLayersLoss
from mmspec_extras.methods.s2d.drafter import SortedExitsDrafter
from mmspec_extras.methods.s2d.head import SortedExits, SortedExitsConfig
from mmspec_extras.methods.s2d.loss import SortedExitsLoss
from tests.contracts.checks import PROMPTS, llama, precise
from tests.contracts.running import decode
from tests.contracts.test_drafters import check_greedy_output, check_sampled_output
from tests.methods.heads_checks import randomise
from tests.tiny_models import tiny_llama

LAYERS, EXITS, LENGTH, THRESHOLD = 4, [1, 2, 3], 4, 0.35


def target() -> CausalTarget:
    return CausalTarget(tiny_llama(layers=LAYERS).double())


def exits_for(target: CausalTarget, **settings: Any) -> SortedExits:
    with torch.random.fork_rng():
        head = SortedExits(SortedExitsConfig.for_target(target.config, target.vocabulary, rank=8, **settings))
    randomise(head, target, 3)
    return head


def routers_for(target: CausalTarget) -> RoutedLayers:
    with torch.random.fork_rng():
        head = RoutedLayers(RoutedLayersConfig.for_target(target.config, target.vocabulary, rank=8))
    randomise(head, target, 3)
    return head


@contextmanager
def changed(target: CausalTarget, head: Adapters, root: int, runs: list[bool]) -> Iterator[None]:
    """From a place on, tokens run only some layers; maps follow these, and in FiRST the skipped ones too."""

    def change(index: int) -> Callable[[nn.Module, tuple[Tensor], Tensor], Tensor]:
        def hook(module: nn.Module, given: tuple[Tensor], made: Tensor) -> Tensor:
            new = (made if runs[index] else given[0])[:, root:]
            if runs[index] or isinstance(head, RoutedLayers):
                size = (new.pow(2).mean(-1, keepdim=True) + 1e-6).sqrt()
                inner = nn.functional.silu(new / size @ head.down[index].T)
                new = new + size * (inner @ head.up[index].T)
            return torch.cat([made[:, :root], new], 1)

        return hook

    layers = target.model.get_decoder().layers
    handles = [layer.register_forward_hook(change(index)) for index, layer in enumerate(layers)]
    yield
    for handle in handles:
        handle.remove()


def said(target: CausalTarget, head: Adapters, text: list[int], root: int, runs: list[bool]) -> Tensor:
    """[n, V] logits of drafting layers from a place of a text on."""
    with changed(target, head, root, runs):
        logits: Tensor = target.model(input_ids=torch.tensor([text]), use_cache=False).logits[0, root:]
    return logits


def upto(exit: int) -> list[bool]:
    return [layer < exit for layer in range(LAYERS)]


def kept(target: CausalTarget, head: RoutedLayers, prompt: list[int]) -> list[bool]:
    """The layers that a prompt keeps."""
    states = target.model(input_ids=torch.tensor([prompt]), output_hidden_states=True).hidden_states
    means = torch.stack([states[layer][0].mean(0) for layer in range(LAYERS)])
    means = means / (means.pow(2).mean(-1, keepdim=True) + torch.finfo(means.dtype).eps).sqrt()
    return ((means * head.routers).sum(-1) + head.bias > 0).tolist()


def drafts_of(drafter: Any, target: CausalTarget, monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Decode a ragged batch; the texts before each draft, and its tokens."""
    found, propose = list[tuple[Any, ...]](), drafter.session.propose

    def noted(self: Any, canvas: Any) -> Any:
        draft = propose(self, canvas)
        rows = zip(canvas.ids, canvas.finish_reasons, draft.tokens[:, 1:].tolist(), strict=True)
        found.append([(list(ids), tokens) for ids, ended, tokens in rows if ended is None])
        return draft

    monkeypatch.setattr(drafter.session, "propose", noted)
    decode(target, PROMPTS, drafter, max_new_tokens=16)
    return [pair for each in found for pair in zip(range(3), each, strict=False)]


@torch.inference_mode()
def test_each_token_is_that_of_the_first_sure_exit(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = target()
    head = exits_for(whole, exits=EXITS)
    drafter = SortedExitsDrafter(head, LENGTH, THRESHOLD).fit(whole)
    used = list[int]()
    for _, (text, drafted) in drafts_of(drafter, whole, monkeypatch):
        root = len(text) - 1
        by_exit = [said(whole, head, text + drafted[:-1], root, upto(exit)) for exit in EXITS]
        for place, token in enumerate(drafted):
            sure = [logits[place].softmax(-1).max() >= THRESHOLD for logits in by_exit]
            used.append(sure.index(True) if any(sure) else len(EXITS) - 1)
            assert token == int(by_exit[used[-1]][place].argmax())
    assert all(used.count(exit) > 5 for exit in range(len(EXITS))), used


@torch.inference_mode()
def test_each_row_drafts_with_the_layers_that_its_prompt_keeps(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = target()
    head = routers_for(whole)
    keeps = [kept(whole, head, prompt) for prompt in PROMPTS]
    assert len({tuple(each) for each in keeps}) > 1, keeps
    compared = 0
    for _, (text, drafted) in drafts_of(RoutedLayersDrafter(head, LENGTH).fit(whole), whole, monkeypatch):
        (row,) = (row for row, prompt in enumerate(PROMPTS) if text[: len(prompt)] == prompt)
        logits = said(whole, head, text + drafted[:-1], len(text) - 1, keeps[row])
        assert drafted == logits.argmax(-1).tolist()
        compared += 1
    assert compared > 20


@pytest.mark.parametrize("method", ["s2d", "first"])
def test_the_loss_is_that_of_each_cut_and_falls(method: str) -> None:
    whole, texts = target(), [list(range(3, 15)), list(range(9, 19))]
    examples = tuple(TrainingExample({"input_ids": torch.tensor([text])}, 5) for text in texts)
    loss: Any
    if method == "s2d":
        loss = SortedExitsLoss(exits_for(whole, exits=[2]), whole, cuts=100, discount=0.7)
        runs = [upto(2)] * 2
    else:
        loss = RoutedLayersLoss(routers_for(whole), whole, cuts=100, discount=0.7, penalty=0.0)
        runs = [kept(whole, loss.head, text[:5]) for text in texts]
    head = loss.head.requires_grad_(True)
    found, nats, weight = loss(DrafterBatch(examples, 0))[0], 0.0, 0.0
    for text, layers in zip(texts, runs, strict=True):
        goals = whole.model(torch.tensor([text])).logits[0].softmax(-1).detach()
        for root in range(4, len(text) - 1):
            logits = said(whole, head, text[:-1], root, layers)[:3].detach()
            each = -(goals[root : root + len(logits)] * logits.log_softmax(-1)).sum(-1)
            discount = 0.7 ** torch.arange(len(each))
            nats, weight = nats + float((discount * each).sum()), weight + float(discount.sum())
    torch.testing.assert_close(found.item(), nats / weight, rtol=1e-5, atol=0)
    optimizer = torch.optim.Adam(head.parameters(), lr=0.01)
    for step in range(12):
        now = loss(DrafterBatch(examples, step))[0]
        optimizer.zero_grad()
        now.backward()
        optimizer.step()
    assert now < 0.95 * found
    if method == "first":
        assert head.routers.grad is not None and head.routers.grad.abs().sum() > 0


@pytest.mark.parametrize("method", ["s2d", "first"])
def test_the_contract_of_drafters_is_kept(method: str) -> None:
    def build(length: int, dtype: torch.dtype) -> Drafter:
        whole = llama() if dtype == torch.float32 else precise()
        if method == "s2d":
            return SortedExitsDrafter(exits_for(whole, exits=[1, 2]), length, THRESHOLD).fit(whole)
        return RoutedLayersDrafter(routers_for(whole), length).fit(whole)

    check_greedy_output(build)
    check_sampled_output(build, 5)


def test_settings_out_of_range_are_refused() -> None:
    whole = llama()
    for exits in ([], [2, 1], [0], [9]):
        with pytest.raises(Exception, match="exits must ascend"):
            exits_for(whole, exits=exits)
    with pytest.raises(InputError, match="threshold"):
        SortedExitsDrafter(exits_for(whole, exits=[1]), threshold=1.5)
    with pytest.raises(InputError, match="layers"):
        RoutedLayersDrafter(routers_for(target())).fit(whole)
