"""The losses of Medusa's and Hydra's heads, compared with slow drafting."""

from __future__ import annotations

from contextlib import closing
from typing import Any

import pytest
import torch

from mmspec.core.sampling import Sampler
from mmspec.heads.drafter import HeadDrafter
from mmspec.methods.hydra.loss import HydraLoss
from mmspec.methods.medusa.loss import MedusaLoss
from mmspec.targets.causal import HiddenStates
from tests.methods.flash_checks import target_of
from tests.methods.heads_checks import drafter_for
from tests.methods.naive_heads import NaiveHydra, NaiveMedusa
from tests.training.own_answers import own_answers

LEARNERS: dict[str, tuple[Any, dict[str, Any]]] = {
    "medusa": (MedusaLoss, {}),
    "medusa, tokens": (MedusaLoss, {"soft": False, "discount": 1.0}),
    "hydra": (HydraLoss, {}),
    "hydra, without prefix attention": (HydraLoss, {"discount": 0.7}),
}


def drafter_of(kind: str, dtype: torch.dtype) -> HeadDrafter:
    return drafter_for(kind.removesuffix(", tokens"), target_of("llava", dtype))


@pytest.mark.parametrize("kind", LEARNERS)
def test_the_loss_is_that_of_drafting_the_slow_way(kind: str) -> None:
    """Every root and every head as in drafting: no batch, no padding, no later token."""
    target, drafter = target_of("llava", torch.float64), drafter_of(kind, torch.float64)
    learner, settings = LEARNERS[kind]
    loss, figures = learner(drafter.model, target, **settings)(own_answers())
    discount, heads = settings.get("discount", 0.8 if learner is MedusaLoss else 1.0), 4
    slow_way = NaiveMedusa if learner is MedusaLoss else NaiveHydra
    nats, weight, hits = 0.0, 0.0, [[] for _ in range(heads)]
    for example in own_answers().examples:
        ids, start = example.inputs["input_ids"], example.answer
        tokens = ids[0].tolist()
        prompt = {**example.inputs, "input_ids": ids[:, : start - 1]}
        naive = slow_way(drafter.model, target, [prompt], Sampler())  # type: ignore[arg-type]
        with closing(HiddenStates(target.model, (-1,))) as reader:
            target.model(**example.inputs)
        taps = reader.take()
        for root in range(start - 1, len(tokens)):
            for head in range(min(heads, len(tokens) - 1 - root)):
                guess = naive.distribution(
                    tokens[start - 1 : root + 1], tuple(tokens[root + 1 : root + 1 + head])
                )
                distribution = target.head(taps[-1][0, root + head]).softmax(-1)
                if not settings.get("soft", True):
                    distribution = torch.zeros_like(distribution).scatter(
                        0, torch.tensor(tokens[root + 1 + head]), 1.0
                    )
                nats -= discount**head * float((distribution * guess).sum())
                weight += discount**head
                hits[head].append(float(distribution.argmax() == guess.argmax()))
    assert float(loss) == pytest.approx(nats / weight, rel=1e-4)
    shares = torch.tensor([sum(each) / len(each) for each in hits])
    assert torch.allclose(figures["agreement"], shares, atol=1e-6)
