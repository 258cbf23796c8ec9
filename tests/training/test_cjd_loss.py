"""The corrector learns from its own drafts, with the target's distributions as goal."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from mmspec.core.sampling import Sampler
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.methods.cjd.drafter import StaleWindow
from mmspec.methods.cjd.loss import CorrectorLoss, WindowBatch, correct_window
from mmspec.pipelines.image_prompts import image_requests
from mmspec.training.data.sequences import Trial
from mmspec.training.recipes import RECIPES
from tests.methods.corrected_checks import head_for
from tests.tiny_models.llamagen import tiny_llamagen

WINDOW = 8


class Prompts:
    """Two images a step, of classes that change."""

    def __init__(self, target: LlamaGenTarget, guidance: float = 3.0) -> None:
        self.target, self.guidance = target, guidance

    def prompts(self, step: int, process: int) -> Trial:
        labels = [step % 5, (step + 2) % 5]
        requests = image_requests(self.target, class_labels=labels, guided=self.guidance != 1)
        return Trial(requests, Sampler(1.0, guidance_scale=self.guidance), self.target.grid.length)


@pytest.fixture(scope="module")
def target() -> LlamaGenTarget:
    return LlamaGenTarget(tiny_llamagen("class"))


def whole_logits(target: LlamaGenTarget, prompt: dict[str, Tensor], tokens: list[int]) -> Tensor:
    """[n + 1, V] logits after a prompt and each token, read at once."""
    ids = torch.cat([prompt["input_ids"], torch.tensor([tokens], dtype=torch.long)], 1)
    _, offset = target.positions(prompt)
    inputs = {**prompt, "input_ids": ids, "position_ids": torch.arange(ids.shape[1])[None] + offset}
    hidden = target.read([inputs], (-1,))[-1]
    return target.head(hidden)[0, prompt["input_ids"].shape[1] - 1 :]


@torch.no_grad()
def test_the_goal_is_what_the_target_says_of_the_drafts(target: LlamaGenTarget) -> None:
    """Compares a window with one forward pass over the image so far and the drafts after it."""
    data = Prompts(target)
    loss = CorrectorLoss(head_for(target), target, learnt_window=WINDOW)
    rollout = loss.rollouts[0]
    asked = data.prompts(0, 0)
    for _ in range(4):
        rollout.advance(lambda: asked, 3)
    batch = rollout.batch
    assert batch is not None
    record = rollout.records[-1]
    # before the last round, a row had emitted all but what that round accepted
    accepted = batch.session.observed.accepted  # type: ignore[attr-defined]
    for row, request in enumerate(asked.requests):
        before = len(batch.canvas.outputs()[row]) - int(accepted[row]) - 1
        drafts = record.new[row].tolist()
        tokens = batch.canvas.outputs()[row][: before - 1] + drafts
        sides = [
            whole_logits(target, dict(inputs), tokens)
            for inputs in (request.inputs, request.negative_inputs)
            if inputs is not None
        ]
        due = (sides[1] + 3.0 * (sides[0] - sides[1]))[before : before + len(drafts)]
        assert torch.allclose(record.goal[row].softmax(-1), due.softmax(-1), atol=1e-5)


def test_it_learns(target: LlamaGenTarget) -> None:
    torch.manual_seed(0)
    data = Prompts(target)
    head = RECIPES["cjd"].build(target, width=32, num_heads=2)
    loss = RECIPES["cjd"].learn(head, target, learnt_window=WINDOW)
    optimizer = torch.optim.AdamW(head.parameters(), lr=1e-2)
    for step in range(80):
        value, figures = loss(loss.make(data, step, 0))
        optimizer.zero_grad()
        value.backward()
        optimizer.step()
    assert int(loss.updates) == 80
    held_out = loss.make(data, 1000, 0)
    stale = (held_out.logits.softmax(-1) - held_out.goal.softmax(-1)).abs().sum(-1) / 2
    _, figures = loss.eval()(held_out)
    before = (stale * held_out.counted).sum(0) / held_out.counted.sum(0).clamp_min(1)
    assert float(figures["distance"][:3].mean()) < 0.85 * float(before[:3].mean())


@torch.no_grad()
def test_what_is_not_there_is_not_read(target: LlamaGenTarget) -> None:
    """Unknown states have no effect."""
    loss = CorrectorLoss(head_for(target), target, learnt_window=WINDOW)
    batch: WindowBatch = loss.make(Prompts(target), 0, 0)
    unknown = ~batch.is_known
    assert unknown.any()
    context = loss.head.config.context
    corrected = []
    for states in (batch.states, batch.states.where(~unknown[..., None], 7.0)):
        stale = StaleWindow(loss.head.of_states(states), batch.old, batch.is_known, batch.logits, context)
        corrected.append(correct_window(loss.head, target, stale, batch.new))
    assert torch.equal(*corrected)
