"""The loss of a FLASH head, compared with slow drafting."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch
from torch.nn.functional import smooth_l1_loss

from mmspec.core.sampling import Sampler
from mmspec.methods.flash import loss as flash_loss
from mmspec.targets.causal import HiddenStates
from tests.methods.flash_checks import head_for, target_of
from tests.methods.naive_heads import NaiveFlash
from tests.training.own_answers import own_answers

BLOCK = 3


def test_the_loss_is_that_of_drafting_the_slow_way() -> None:
    """Every pair (row t, offset i) as the drafter would predict it: no batch, no padding, no later token."""
    target = target_of("llava", torch.float64)
    head = head_for(target, block=BLOCK, compressor="attention_pruning").train()
    module = flash_loss.FlashLoss(head, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(flash_loss, "NOISE", 0.0)
        loss, figures = module(own_answers())
    states, tokens, hits = [], [], [[] for _ in range(BLOCK)]
    for example in own_answers().examples:
        ids, start = example.inputs["input_ids"], example.answer
        prompt = {**example.inputs, "input_ids": ids[:, :start]}
        naive = NaiveFlash(head, target, [prompt], Sampler(), block=BLOCK)
        with closing(HiddenStates(target.model, (-1,))) as reader:
            target.model(**example.inputs)
        taps = reader.take()
        for t in range(start - 1, ids.shape[1]):
            rows, _, _ = naive.committed(prompt, ids[0, start : t + 1].tolist())
            predicted = head.predict(naive.state(rows), BLOCK)[0]
            for i in range(BLOCK):
                if t + i + 1 >= ids.shape[1]:
                    continue
                true = taps[-1][0, t + i]
                distribution = target.head(true).softmax(-1)
                guess = (target.head(predicted[i]) + head.bias(ids[0, t + i])).log_softmax(-1)
                states.append(smooth_l1_loss(predicted[i], true))
                tokens.append(-(distribution * guess).sum())
                hits[i].append(float(distribution.argmax() == guess.argmax()))
    due = torch.stack(states).mean(), torch.stack(tokens).mean().float()  # softmax is in single precision
    assert torch.allclose(figures["states"], due[0], rtol=1e-4), "hidden states"
    assert torch.allclose(figures["tokens"], due[1], rtol=1e-4), "tokens"
    assert torch.allclose(
        loss, flash_loss.STATE_WEIGHT * due[0] + flash_loss.TOKEN_WEIGHT * due[1], rtol=1e-4
    )
    shares = torch.tensor([sum(each) / len(each) for each in hits])
    assert torch.allclose(figures["agreement"], shares, atol=1e-6)
