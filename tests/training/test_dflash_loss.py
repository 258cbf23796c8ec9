"""The loss of DFlash and DSpark heads, compared with single blocks."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from mmspec.errors import InputError
from mmspec.heads.model import HIDDEN
from mmspec.methods.dflash import loss as dflash_loss
from mmspec.methods.dflash.head import DFlashHead
from mmspec.methods.dflash.loss import DFlashLoss
from mmspec.training.losses.base import Blocks, Reading, draw_anchors, read
from tests.methods.dflash_checks import KINDS, WITH_IMAGES, alone, head_for
from tests.methods.flash_checks import target_of
from tests.training.own_answers import own_answers


@pytest.mark.parametrize(("kind", "family"), WITH_IMAGES)
@pytest.mark.every(2)
def test_training_reads_what_decoding_reads(kind: str, family: str) -> None:
    """Every block of a padded batch with images, also where positions have three axes."""
    target = target_of(family, torch.float64)
    head, given = head_for(target, kind), own_answers(family)
    reading = read(target, given.examples, (0, *head.taps, HIDDEN))
    blocks = Blocks.of(reading.learnt, head.config.depth)
    axes = head.config.mrope_section is not None
    places = dflash_loss.token_positions(target, given) if axes else None
    hidden = dflash_loss.denoise(head, target, reading, blocks, places)
    assert len(set(blocks.row.tolist())) == len(given.examples) and len(hidden) > 6
    first = 0 if head.config.anchor_predicts else 1
    for index, (row, root) in enumerate(zip(blocks.row, blocks.ahead[:, 0], strict=True)):
        inputs = dict(given.examples[row].inputs)
        tokens = inputs["input_ids"][0, : root + 1].tolist()
        inputs["input_ids"] = inputs["input_ids"][:, :root]
        if "mm_token_type_ids" in inputs:
            inputs["mm_token_type_ids"] = inputs["mm_token_type_ids"][:, :root]
        due = alone(head, target, inputs, tokens)[first:]
        assert (hidden[index] - due).abs().max() < 5e-6, (row, root)


@torch.no_grad()
def choice_of(head: DFlashHead, target: Any, reading: Reading, blocks: Blocks, hidden: Tensor) -> Tensor:
    """Cross-entropy of the scores of candidates, block by block, given the true tokens."""
    nats, weights = [], []
    context = head.join([reading.taps[tap] for tap in head.taps])
    for block, (row, ahead) in enumerate(zip(blocks.row, blocks.ahead, strict=True)):
        logits = head.logits(hidden[block], target.head)
        anchor = context[row, blocks.before[block]]
        lattice = head.lattice(hidden[None, block], logits[None], anchor[None], target.embed)
        for place in range(head.config.depth):
            before = reading.tokens[row, ahead[place]]
            known = not place or head.lilicorr is None or before in lattice.tokens[0, place - 1]
            if not blocks.counted[block, place] or not known:
                continue
            scores = head.scores(lattice, place, before[None, None], hidden[None, block, None, place])[0, 0]
            goal = target.head(reading.taps[HIDDEN][row, ahead[place]]).softmax(-1)
            wanted = goal[lattice.index[0, place]]
            nats.append(-(wanted * scores.log_softmax(-1)).sum() * 0.8**place)
            weights.append(0.8**place)
    made: Tensor = torch.stack(nats).sum() / sum(weights)
    return made


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_that_of_every_slot(kind: str) -> None:
    """Compares the cross-entropy of each slot with the target's distribution, given the true tokens."""
    target = target_of("llava", torch.float64)
    head, given = head_for(target, kind), own_answers()
    loss, figures = DFlashLoss(head, target, anchors=100, discount=0.8)(given)
    reading = read(target, given.examples, (0, *head.taps, HIDDEN))
    blocks = Blocks.of(reading.learnt, head.config.depth)
    blocks = blocks.at(reading.learnt[blocks.row, blocks.ahead[:, 0]])  # not the ends of prompts
    hidden = dflash_loss.denoise(head, target, reading, blocks)
    nats, weights, common = [], [], []
    for block, (row, ahead) in enumerate(zip(blocks.row, blocks.ahead, strict=True)):
        state = None
        for place in range(head.config.depth):
            logits = head.logits(hidden[block, place], target.head)
            before = reading.tokens[row, ahead[place]]
            if head.markov_head is not None:
                bias, state = head.told(place, before[None], hidden[None, block, place], state, target.embed)
                logits = logits + bias[0]
            if not blocks.counted[block, place]:
                continue
            goal = target.head(reading.taps[HIDDEN][row, ahead[place]]).softmax(-1)
            nats.append(-(goal * logits.log_softmax(-1)).sum() * 0.8**place)
            weights.append(0.8**place)
            share = torch.minimum(goal, logits.softmax(-1)).sum()
            said = head.confidences(hidden[block, place], before)
            common.append(-(share * said.sigmoid().log() + (1 - share) * (1 - said.sigmoid()).log()))
    due: Any = sum(nats) / sum(weights)
    if head.has_candidates:
        due = due + choice_of(head, target, reading, blocks, hidden)
    if head.confidence_head is not None:
        assert torch.allclose(figures["confidence"].double(), sum(common) / len(common), rtol=1e-4)  # type: ignore[arg-type]
        due = due + sum(common) / len(common)
    assert torch.allclose(loss.double(), due, rtol=1e-4)


def test_so_many_blocks_of_each_sequence_are_drawn() -> None:
    target = target_of("llava", torch.float64)
    reading = read(target, own_answers().examples, (0,))
    blocks = Blocks.of(reading.learnt, 3)
    few = blocks.at(draw_anchors(blocks.row, 2, 0))
    assert torch.bincount(few.row).tolist() == [2] * len(reading.lengths)
    at = [(int(row), int(place)) for row, place in zip(blocks.row, blocks.before, strict=True)]
    kept = [(int(row), int(place)) for row, place in zip(few.row, few.before, strict=True)]
    assert set(kept) < set(at) and len(set(kept)) == len(kept)
    assert not torch.equal(few.before, blocks.before[draw_anchors(blocks.row, 2, 1)])
    assert torch.equal(draw_anchors(blocks.row, 1000, 0), torch.arange(len(blocks.row)))
    for anchors in (0, 1.5, "two"):
        with pytest.raises(InputError, match="anchors"):
            DFlashLoss(head_for(target), target, anchors=anchors)  # type: ignore[arg-type]
