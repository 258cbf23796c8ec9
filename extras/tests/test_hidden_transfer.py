"""Pseudo hidden states: exact outputs, and levels and losses compared with forward passes of one hook."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, TrainingExample
from mmspec_extras.methods.hidden_transfer.drafter import HiddenTransferDrafter
from mmspec_extras.methods.hidden_transfer.head import HiddenTransfer, HiddenTransferConfig
from mmspec_extras.methods.hidden_transfer.loss import HiddenTransferLoss
from tests.contracts.checks import PROMPTS, llama, precise
from tests.contracts.running import decode, generate
from tests.methods.heads_checks import randomise
from tests.tiny_models import tiny_llama, tiny_lm


def drafter_for(target: CausalTarget, **shape: Any) -> HiddenTransferDrafter:
    with torch.random.fork_rng():
        head = HiddenTransfer(HiddenTransferConfig.for_target(target.config, target.vocabulary))
    randomise(head, target, 3)
    return HiddenTransferDrafter(head, **shape).fit(target)


def said_after(target: CausalTarget, head: HiddenTransfer, text: list[int]) -> Tensor:
    """[K, V] logits at the pseudo states of the last token, without a cache and by a hook of its own."""
    count = head.config.num_probes

    def enter(module: object, args: tuple[Tensor]) -> tuple[Tensor]:
        states = args[0].clone()
        own = states[0, len(text) - 1]
        pseudo = [head.weight[i] @ own + head.embeddings[i] for i in range(count)]
        return (torch.cat([states[:, : len(text)], torch.stack(pseudo)[None]], 1),)

    handle = target.model.get_decoder().layers[head.config.layer].register_forward_pre_hook(enter)
    logits: Tensor = target.model(torch.tensor([text + [0] * count])).logits[0, len(text) :]
    handle.remove()
    return logits


@pytest.mark.parametrize("shape", [{}, {"num_draft_tokens": 5, "probes_per_node": 0.3}], ids=str)
def test_outputs_are_those_of_generate_and_of_plain_sampling(shape: dict[str, Any]) -> None:
    run = decode(llama(), PROMPTS, drafter_for(llama(), **shape), max_new_tokens=24)
    assert run.outputs == [generate(llama().model, prompt, 24) for prompt in PROMPTS]
    how: Any = {"sampler": Sampler(0.9, top_p=0.95), "max_new_tokens": 24, "seed": [7, 8, 9]}
    drafter = drafter_for(precise(), sampling="coupled", **shape)
    run = decode(precise(), PROMPTS, drafter, **how)
    assert run.outputs == decode(precise(), PROMPTS, **how).outputs


@torch.inference_mode()
def test_levels_are_what_the_target_says_at_the_mapped_states(monkeypatch: pytest.MonkeyPatch) -> None:
    target, drafts = precise(), list[Any]()
    drafter = drafter_for(target, num_draft_tokens=6, depth=3, top_k=2, probes_per_node=3)
    propose = drafter.session.propose
    monkeypatch.setattr(
        drafter.session,
        "propose",
        lambda self, canvas: drafts.append((list(canvas.ids[0]), propose(self, canvas))) or drafts[-1][1],
    )
    decode(target, PROMPTS[:1], drafter, max_new_tokens=24)
    for text, draft in drafts[1:]:
        logits = said_after(target, drafter.model, text[:-1])
        for level in range(3):
            at = draft.depth[0] == level + 1
            assert set(draft.tokens[0, at].tolist()) <= set(logits[level].topk(2).indices.tolist())
            assert draft.valid[0, at].all()
    assert len(drafts) > 5


def test_the_loss_is_that_of_each_cut_read_alone() -> None:
    target = CausalTarget(tiny_lm())  # the cached one may have been used in inference mode
    head, texts = drafter_for(target).model.requires_grad_(True), [list(range(3, 15)), list(range(9, 17))]
    examples = tuple(TrainingExample({"input_ids": torch.tensor([text])}, 5) for text in texts)
    loss = HiddenTransferLoss(head, target, cuts=100, discount=0.7)(DrafterBatch(examples, 0))[0]
    nats, weight = torch.zeros(()), 0.0
    for text in texts:
        goals = target.model(torch.tensor([text])).logits[0].softmax(-1)
        for root in range(4, len(text) - 1):
            logits, count = said_after(target, head, text[:root]), min(3, len(text) - 1 - root)
            each = -(goals[root : root + count] * logits[:count].log_softmax(-1)).sum(-1)
            discount = 0.7 ** torch.arange(count)
            nats, weight = nats + (discount * each).sum(), weight + float(discount.sum())
    torch.testing.assert_close(loss.double(), nats / weight, rtol=1e-5, atol=0)
    torch.testing.assert_close(
        torch.autograd.grad(loss, [head.weight]),
        torch.autograd.grad(nats / weight, [head.weight]),
        rtol=1e-4,
        atol=1e-7,
    )


def test_what_cannot_change_states_is_refused() -> None:
    drafter, compiled = drafter_for(llama()), CausalTarget(tiny_llama())
    check: Callable[..., Any] = HiddenTransferConfig.for_target
    for layer in (-1, 9):
        with pytest.raises(Exception, match="must be"):
            check(llama().config, 64, layer=layer)
    compiled.steps = object()  # type: ignore[assignment]
    with pytest.raises(InputError, match="compile"):
        decode(compiled, PROMPTS, drafter.fit(compiled), max_new_tokens=4)
    drafter.model.weight[0, 0, 0] = torch.nan
    with pytest.raises(InputError, match="finite"):
        drafter.fit(llama())
