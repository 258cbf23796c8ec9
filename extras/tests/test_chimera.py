"""Chimera's trees compared with its head on one path at a time, and its loss with that of single paths."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from extras.tests.test_more_heads import check_paths, head_for
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, TrainingExample
from mmspec_extras.methods.chimera.drafter import ChimeraDrafter
from mmspec_extras.methods.chimera.loss import ChimeraLoss
from tests.contracts.checks import llama, precise
from tests.tiny_models import tiny_lm


def logits_after(head: Any, target: CausalTarget, text: list[int], path: list[int]) -> Tensor:
    """[V] logits after a path: states before the root, then trigrams, with no cache, batch or tree."""
    states = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][:, :-1]
    line = target.embed(torch.tensor([[*text, *path]]))
    line = torch.cat([torch.zeros_like(line[:, :1].expand(-1, 2, -1)), line], 1)
    grams = torch.stack(
        [line[:, at : at + 3].flatten(1) for at in range(len(text) - 1, line.shape[1] - 2)], 1
    )
    encoded = head.trigram(
        grams + torch.nn.functional.silu(grams @ head.blocks[0].weight.T + head.blocks[0].bias)
    )
    rows = torch.cat([states, encoded], 1)
    fused = head(rows, torch.arange(rows.shape[1])[None])[0, -1]
    logits: Tensor = target.head(head.mlps[len(path)](torch.cat([states[0, -1], fused])))
    return logits


@torch.inference_mode()
def test_every_path_has_the_likelihood_that_the_head_alone_gives_it() -> None:
    head = head_for("chimera", precise(), num_heads=3)
    drafter = ChimeraDrafter(head, num_draft_tokens=8, depth=3, top_k=3).fit(precise())
    check_paths(drafter, lambda *given: logits_after(head, precise(), *given))


def test_the_loss_is_that_of_each_root_read_alone() -> None:
    target = CausalTarget(tiny_lm())  # the cached one may have been used in inference mode
    head = head_for("chimera", target, num_heads=3).requires_grad_(True)
    texts, nats, weight = [list(range(3, 13)), list(range(9, 17))], torch.zeros(()), 0.0
    examples = tuple(TrainingExample({"input_ids": torch.tensor([text])}, 5) for text in texts)
    loss, _ = ChimeraLoss(head, target, discount=0.7)(DrafterBatch(examples, 0))
    for text in texts:
        goals = target.model(torch.tensor([text])).logits[0].softmax(-1)
        for root in range(4, len(text) - 1):
            for level in range(min(3, len(text) - 1 - root)):
                path = text[root + 1 : root + 1 + level]
                said = logits_after(head, target, text[: root + 1], path).log_softmax(-1)
                nats = nats - 0.7**level * (goals[root + level] * said).sum()
                weight += 0.7**level
    torch.testing.assert_close(loss.double(), nats / weight, rtol=1e-5, atol=0)
    weights = [head.trigram.weight, head.decoder.layers[0].self_attn.k_proj.weight]
    torch.testing.assert_close(
        torch.autograd.grad(loss, weights), torch.autograd.grad(nats / weight, weights), rtol=1e-4, atol=1e-7
    )


def test_the_encoder_of_full_context_cannot_be_left_out() -> None:
    with pytest.raises(Exception, match="prefix_attention must be True"):
        head_for("chimera", llama(), prefix_attention=False)
