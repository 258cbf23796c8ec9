"""A target's distributions computed once per place, compared with each pair alone."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from mmspec.training.data.states import Summary
from mmspec.training.losses import goals as goals_module
from mmspec.training.losses.base import Blocks, token_loss
from mmspec.training.losses.goals import Goals
from tests.training.own_answers import WORDS, speaker

TOKENS = torch.tensor([0, 2, 3, 7, 8, 11])


def batch() -> tuple[Tensor, Blocks]:
    """[3, 19, d] states, and blocks of 4 in answers, one of two turns."""
    states = torch.randn(3, 19, 32, generator=torch.Generator().manual_seed(0)) * 4
    learnt = torch.zeros(3, 19, dtype=torch.bool)
    learnt[0, 2:7] = learnt[1, 5:19] = learnt[2, 1:3] = learnt[2, 6:] = True
    return states, Blocks.of(learnt, 4)


def assert_same_with_a_summary(
    made: Goals, states: Tensor, place: tuple[Tensor, Tensor], counted: Tensor, tokens: Tensor, **how: bool
) -> None:
    """The whole output matrix is not used again."""
    logits = speaker().head(states).float()
    told = Summary(logits.argmax(-1), logits.logsumexp(-1))
    few = speaker().head_of(tokens)
    again = Goals.of(
        SimpleNamespace(vocabulary=WORDS),  # type: ignore[arg-type]
        states,
        place,
        counted,
        tokens,
        summary=told,
        read_out=few,
        **how,
    )
    assert torch.allclose(again.table, made.table, atol=1e-6)
    for name in ("likeliest", "known", "at"):
        assert torch.equal(getattr(again, name), getattr(made, name))


@pytest.mark.parametrize("known", ["all", "some", "some, conditional"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_losses_are_those_of_every_pair_for_itself(
    known: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Value, gradient and agreement, in pieces of two rows that do not divide them."""
    monkeypatch.setattr(goals_module, "PIECE", 2 * WORDS + 1)
    monkeypatch.setattr(goals_module, "PRODUCT", 3 * WORDS)
    states, blocks = batch()
    place, tokens = (blocks.row[:, None], blocks.ahead), None if known == "all" else TOKENS
    how = {"conditional": known.endswith("conditional")}
    made = Goals.of(speaker(), states, place, blocks.counted, tokens, **how)
    assert len(made.table) < int(blocks.counted.sum()), "each place once"
    if tokens is not None:
        assert_same_with_a_summary(made, states, place, blocks.counted, tokens, **how)

    raw = speaker().head(states[place]).float()
    goal, best = raw.softmax(-1), raw.argmax(-1)
    counted = blocks.counted
    if tokens is not None:
        goal = raw[..., tokens].softmax(-1) if how["conditional"] else goal[..., tokens]
        counted = counted & torch.isin(best, tokens)
        assert not torch.equal(counted, blocks.counted)
    assert torch.allclose(made.table[made.at][blocks.counted], goal[blocks.counted], atol=1e-7)
    assert torch.equal((blocks.counted & made.known[made.at]), counted)

    noise = torch.Generator().manual_seed(1)
    old = (goal.log() + torch.randn(goal.shape, generator=noise)).to(dtype).requires_grad_()
    new = old.detach().clone().requires_grad_()
    weights = counted * 0.8 ** torch.arange(4)
    nats = cross_entropy(old.float().flatten(0, 1), goal.flatten(0, 1), reduction="none").view_as(weights)
    due = (nats * weights).sum() / weights.sum()
    loss, agreement = token_loss(new, made, counted, 0.8)
    assert torch.allclose(loss, due, rtol=1e-6)
    for each in (due, loss):
        each.backward()
    assert old.grad is not None and new.grad is not None and old.grad.any()
    assert torch.allclose(new.grad, old.grad, atol=1e-7 if dtype == torch.float32 else 1e-3)
    likeliest = (old.detach().argmax(-1) == goal.argmax(-1)) & counted
    if dtype == torch.float32:  # else there are ties
        assert torch.equal(agreement, likeliest.sum(0) / counted.sum(0)) and 0 < agreement.min() < 1
    shares = torch.minimum(goal, old.detach().float().softmax(-1)).sum(-1)
    assert torch.allclose(made.common(old.detach())[counted], shares[counted], atol=1e-6)
