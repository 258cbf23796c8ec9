"""Falcon's blocks compared with its head on one path at a time, and its loss with that of single blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from extras.tests.test_more_heads import check_paths, head_for
from mmspec.errors import InputError
from mmspec.methods.eagle import loss as eagle_loss
from mmspec.targets import CausalTarget
from mmspec.training.data.sequences import DrafterBatch, TrainingExample
from mmspec_extras.methods.falcon.drafter import FalconDrafter
from mmspec_extras.methods.falcon.loss import FalconLoss
from tests.contracts.checks import llama, precise
from tests.tiny_models import tiny_lm


def pairs_of(head: Any, target: Any, text: list[int]) -> Tensor:
    """[1, k - 2 + L, 2d] pairs of a text, zeros first."""
    tokens = torch.tensor([text])
    states = target.model(tokens, output_hidden_states=True).hidden_states[-1]
    before = torch.cat([torch.zeros_like(states[:, :1]), states[:, :-1]], 1)
    pairs = torch.cat([target.embed(tokens), before], -1)
    return torch.cat([pairs.new_zeros(1, head.config.block - 2, pairs.shape[-1]), pairs], 1)


def last_block(head: Any, pairs: Tensor) -> Tensor:
    """[1, k, d] states that the last k pairs predict, all of which see everything."""
    rows, _ = head.lstm(pairs)
    size = rows.shape[1]
    hidden: Tensor = head(rows, torch.arange(size)[None], rows.new_zeros(1, 1, size, size))
    return hidden[:, -head.config.block :]


@pytest.mark.parametrize("block", [2, 3])
@torch.inference_mode()
def test_every_path_has_the_likelihood_that_the_head_alone_gives_it(block: int) -> None:
    target = precise()
    head = head_for("falcon", target, block=block)

    def logits_after(text: list[int], path: list[int]) -> Tensor:
        pairs, whole = pairs_of(head, target, text), len(path) // block * block
        for start in range(0, whole, block):
            drafted = target.embed(torch.tensor([path[start : start + block]]))
            pairs = torch.cat([pairs, torch.cat([drafted, last_block(head, pairs)], -1)], 1)
        logits: Tensor = target.head(last_block(head, pairs)[0, len(path) - whole])
        return logits

    tree = "x".join(["2", "2", *["1"] * (2 * block - 1)])  # ends within a third block
    check_paths(FalconDrafter(head, tree=tree).fit(target), logits_after)


@pytest.mark.parametrize(("block", "seed"), [(2, 0), (2, 1), (3, 2)])
def test_the_loss_is_that_of_blocks_read_alone(
    block: int, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Some blocks read their first pairs in place of those before; the loss counts the other predictions."""
    monkeypatch.setattr(eagle_loss, "NOISE", 0.0)
    target, learnt_from = CausalTarget(tiny_lm()), 4  # the cached one may have been used in inference mode
    head = head_for("falcon", target, block=block).requires_grad_(True)
    texts = [list(range(3, 20)), list(range(9, 21))]
    examples = [TrainingExample({"input_ids": torch.tensor([text])}, learnt_from) for text in texts]
    loss, inputs = FalconLoss(head, target, glance=0.5), list[Tensor]()
    predict = loss._predict
    monkeypatch.setattr(loss, "_predict", lambda *given: inputs.append(given[0]) or predict(*given))
    total, figures = loss(DrafterBatch(tuple(examples), seed))
    states, tokens, count, glanced = torch.zeros(()), torch.zeros(()), 0, 0
    for text, seen in zip(texts, (inputs[0] != inputs[1]).any(-1), strict=True):
        true = target.model(torch.tensor([text]), output_hidden_states=True).hidden_states[-1][0]
        read = pairs_of(head, target, text)
        glanced += int(seen.sum())
        for place in seen.nonzero()[:, 0].tolist():
            read[0, place] = pairs_of(head, target, text)[0, place + block]
        for root in range(learnt_from - 1, len(text) - 1):
            end = root + block - 2  # place of the root's pair
            if (end + 1 + seed) % block:
                continue
            for offset, state in enumerate(last_block(head, read[:, : end + 1])[0]):
                place, token = end - block + 1 + offset, root + offset
                if token < len(text) - 1 and not seen[place]:
                    states = states + smooth_l1_loss(state, true[token])
                    goal = target.head(true[token]).softmax(-1)
                    tokens = tokens - (goal * target.head(state).log_softmax(-1)).sum()
                    count += 1
                else:
                    assert not (seen[place] and offset), "no more of a block than its beginning is seen"
    assert glanced > 2
    torch.testing.assert_close(figures["states"].double(), (states / count).double(), rtol=1e-5, atol=0)
    torch.testing.assert_close(figures["tokens"].double(), (tokens / count).double(), rtol=1e-5, atol=0)
    assert total.requires_grad


def test_settings_out_of_range_are_refused() -> None:
    with pytest.raises(InputError, match="from 0 to 1"):
        FalconLoss(head_for("falcon", llama()), llama(), glance=1.5)
    with pytest.raises(Exception, match="block must be from 2 to 16"):
        head_for("falcon", llama(), block=1)
