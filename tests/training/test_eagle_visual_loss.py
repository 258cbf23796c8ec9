"""Training of EAGLE heads on images, compared with slow drafting: training matches decoding."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn.functional import smooth_l1_loss

from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.methods.eagle.head import EagleHead
from mmspec.methods.eagle.loss import EagleLoss, ViSpecLoss
from mmspec.targets import VisionLanguageTarget
from mmspec.training.data.sequences import TrainingExample
from tests.heads.visual_checks import KINDS, NaiveVisual
from tests.methods.eagle_checks import head_for
from tests.methods.flash_checks import target_of
from tests.methods.naive_eagle import read_whole
from tests.training.own_answers import own_answers

CASES = [
    *((kind, "llava", 1) for kind in KINDS),
    *((kind, "qwen2_5_vl", 1) for kind in ("vispec", "hivis")),
    ("vispec", "llava", 2),
    ("msd", "qwen2_5_vl", 2),
]


def predicted_the_slow_way(
    head: EagleHead, target: VisionLanguageTarget, example: TrainingExample, depth: int
) -> tuple[Tensor, Tensor]:
    """[m, d] what the head predicts of an answer's states at that depth of a draft, and what they are."""
    ids, start = example.inputs["input_ids"], example.answer
    prompt = {**example.inputs, "input_ids": ids[:, :start]}
    if "mm_token_type_ids" in prompt:
        prompt["mm_token_type_ids"] = prompt["mm_token_type_ids"][:, :start]
    naive = NaiveVisual(head, target, [prompt], Sampler())
    taps, _ = read_whole(target, prompt, ids[0, start:].tolist())
    predicted = []
    places = range(start - 1 + depth, ids.shape[1] - 1)
    for t in places:
        rows, positions, summary = naive.committed(prompt, ids[0, start : t + 1 - depth].tolist())
        hidden = head(rows, positions)[:, -1:]
        if depth:
            candidate = head.fuse(target.embed(ids[:, t : t + 1]), hidden, summary)
            places_of = torch.cat([positions, positions[..., -1:] + 1], -1)
            hidden = head(torch.cat([rows, candidate], 1), places_of)[:, -1:]
        predicted.append(hidden[0, 0])
    return torch.stack(predicted), taps[-1][0, list(places)]


def ranks_one_by_one(distribution: Tensor, logits: Tensor) -> Tensor:
    """Minus the logarithm of the probability to draw a distribution's ten likeliest tokens in their order."""
    left = distribution.sort(descending=True).indices[:10].tolist()
    total = torch.zeros(())
    while left:
        total = total - logits[left].log_softmax(-1)[0]
        left = left[1:]
    return total


@pytest.mark.parametrize(("kind", "family", "depths"), CASES)
@pytest.mark.every(3)
def test_the_loss_is_that_of_drafting_the_slow_way(kind: str, family: str, depths: int) -> None:
    """Every learnt row as the drafter would predict it: no batch, no padding, no later token."""
    target = target_of(family, torch.float64)
    head = head_for(target, **KINDS[kind])
    learner = (EagleLoss if depths == 1 else ViSpecLoss)(head, target)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("mmspec.methods.eagle.loss.NOISE", 0.0)
        loss, figures = learner(own_answers(family))
    pairs = [
        predicted_the_slow_way(head, target, example, depth)
        for depth in range(depths)
        for example in own_answers(family).examples
    ]
    predicted, true = (torch.cat(parts) for parts in zip(*pairs, strict=True))
    distribution, logits = target.head(true).float().softmax(-1), target.head(predicted).float()
    due = {
        "states": smooth_l1_loss(predicted, true),
        "tokens": -(distribution * logits.log_softmax(-1)).sum(-1).mean(),
        "agreement": (distribution.argmax(-1) == logits.argmax(-1)).float().mean(),
    }
    total = due["states"] + 0.1 * due["tokens"]
    if depths == 2:
        due["probabilities"] = (distribution - logits.softmax(-1)).abs().sum(-1).mean()
        due["ranks"] = torch.stack(
            [ranks_one_by_one(*each) for each in zip(distribution, logits, strict=True)]
        ).mean()
        total = total + 10 * due["probabilities"] + 0.1 * due["ranks"]
    for name, value in due.items():
        assert torch.allclose(figures[name].double(), value.double(), rtol=1e-5), name
    assert torch.allclose(loss.double(), total.double(), rtol=1e-5)


def test_each_part_weighs_what_it_is_told_to() -> None:
    target = target_of("llava")
    head, given = head_for(target, **KINDS["vispec"]), own_answers(dtype=torch.float32)
    _, figures = ViSpecLoss(head, target)(given)
    parts = {
        "imitation": figures["states"] + 0.1 * figures["tokens"],
        "probabilities": figures["probabilities"],
        "ranks": figures["ranks"],
    }
    for name, due in parts.items():
        weights = dict.fromkeys(parts, 0.0) | {name: 2.0}
        torch.testing.assert_close(ViSpecLoss(head, target, **weights)(given)[0], 2 * due)
    with pytest.raises(InputError, match="random"):
        ViSpecLoss(head_for(target, visual="embedded", compressor="gate"), target)
