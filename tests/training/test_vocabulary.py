"""Losses of heads that draft only frequent tokens, and initial weights of such heads."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from mmspec.training.losses.base import DrafterLoss
from mmspec.training.losses.goals import Goals
from mmspec.training.losses.levels import hit_rates
from mmspec.training.recipes import RECIPES
from tests.training.own_answers import WORDS, Sentences, speaker

FEW = 7
SHARED = {
    **{name: {} for name in ("medusa", "hydra", "mtp", "flash", "eagle", "msd", "vispec", "specvlm")},
    "dflash": {"block": 4},
    "dspark": {"block": 4},
    "medusa, tokens": {"soft": False},
}


def learner_for(name: str) -> DrafterLoss:
    """The loss of a new head that knows every other token of its target and the first."""
    method, settings = RECIPES[name.split(",")[0]], SHARED[name]
    head: Any = method.build(speaker(), frequent_tokens=FEW, **settings)
    torch.manual_seed(0)
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.3)  # zeros, which heads begin with, would not tell much
    head.learn_vocabulary(torch.tensor([0, *range(1, WORDS, 2)]))
    return method.learn(head, speaker(), **settings)


@pytest.mark.parametrize("name", SHARED)
def test_a_loss_is_that_of_all_logits_indexed(name: str) -> None:
    learner, indexed = learner_for(name), learner_for(name)
    tokens = learner.head.draft_tokens
    indexed.__dict__["read_out"] = lambda hidden: speaker().head(hidden)[..., tokens]
    batch = Sentences().batch(0, 0)
    torch.manual_seed(1)
    loss, figures = learner(batch)
    torch.manual_seed(1)
    due, others = indexed(batch)
    torch.testing.assert_close(loss, due)
    torch.testing.assert_close(figures, others)
    loss.backward()
    due.backward()
    for (key, own), (_, other) in zip(
        learner.head.named_parameters(), indexed.head.named_parameters(), strict=True
    ):
        torch.testing.assert_close(own.grad, other.grad, msg=key)
    assert loss > 0 and any(weight.grad is not None for weight in learner.head.parameters())


def test_tokens_that_are_not_drafted_cost_nothing_and_are_no_hits() -> None:
    """By hand, of Medusa's heads: what the target would say, with its probabilities as they are."""
    learner: Any = learner_for("medusa")
    batch = Sentences().batch(0, 0)
    with torch.no_grad():
        loss, figures = learner(batch)
        logits, goal, counted, known = learner.judge(batch)
        rates = hit_rates(learner, [batch], 1)
    assert isinstance(goal, Goals)
    tokens = learner.head.draft_tokens.tolist()
    nats, weight, hits, heads = 0.0, 0.0, [0] * logits.shape[1], logits.shape[1]
    reading = learner.read(batch)
    true = speaker().head(reading.taps[-1]).softmax(-1)
    row = 0
    for each, length in enumerate(reading.lengths):
        for root in range(2, length - 1):
            for head in range(min(heads, length - 1 - root)):
                said = true[each, root + head]
                assert bool(known[row, head]) == (int(said.argmax()) in tokens)
                if int(said.argmax()) in tokens:
                    guess = logits[row, head].log_softmax(-1)
                    nats -= 0.8**head * float((said[tokens] * guess).sum())
                    weight += 0.8**head
                    hits[head] += int(guess.argmax()) == tokens.index(int(said.argmax()))
            row += 1
    assert row == len(logits) and not bool(known[counted].all())
    assert float(loss) == pytest.approx(nats / weight, rel=1e-4)
    shares = [hit / int(each) for hit, each in zip(hits, (counted & known).sum(0), strict=True)]
    assert figures["agreement"].tolist() == pytest.approx(shares)
    assert [rate for (rate,) in rates] == pytest.approx(
        [hit / int(each) for hit, each in zip(hits, counted.sum(0), strict=True)], abs=1e-4
    )


@pytest.mark.parametrize("name", SHARED)
def test_a_new_head_drafts_what_is_learnt_most(name: str) -> None:
    method = RECIPES[name.split(",")[0]]
    head: Any = method.build(speaker(), frequent_tokens=3)
    method.learner.prepare(head, Sentences(), speaker())
    learnt = [
        each.inputs["input_ids"][0][each.learnt]
        for k in range(128)
        for each in Sentences().batch(k, 0).examples
    ]
    often = torch.bincount(torch.cat(learnt), minlength=WORDS).sort(descending=True, stable=True).indices
    assert head.draft_tokens.tolist() == sorted(often[:3].tolist())
