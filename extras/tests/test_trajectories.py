"""CJ-GRPO: the loss by its formula, and states that are those of the decoding."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from extras.reference.trajectories import TrajectoryLoss, masked_states, share_right, states_layout
from mmspec import MMSpecPipeline
from mmspec.scenes import describe, render, sample_scene
from mmspec.scenes.world import CANVAS
from mmspec_extras.trajectories import advantages, trajectory_loss
from reference.vlm_data import image_pixels
from reference.vlm_model import patch_states, visual_tokens
from reference.vlm_scores import DESCRIPTION_PROMPT

ASSETS = Path(__file__).parents[2] / "assets"


def test_loss_is_the_mean_of_each_forward_pass_then_of_rows() -> None:
    row, step = torch.tensor([0, 0, 0, 1, 1]), torch.tensor([0, 0, 2, 0, 1])
    old, base = torch.tensor([-1.0, -2.0, -0.5, -3.0, -0.1]), torch.tensor([-1.5, -2.0, -0.7, -2.0, -0.1])
    new = torch.tensor([-0.2, -2.1, -0.6, -4.0, -0.1])
    advantage = torch.tensor([1.0, 1.0, 1.0, -0.5, -0.5])
    terms = []
    for index in range(5):
        ratio = float((new[index] - old[index]).exp())
        clipped = min(max(ratio, 0.8), 1.2)
        apart = float(base[index] - new[index])
        gain = min(ratio * float(advantage[index]), clipped * float(advantage[index]))
        terms.append(0.1 * (torch.tensor(apart).exp().item() - apart - 1) - gain)
    due = (((terms[0] + terms[1]) / 2 + terms[2]) / 2 + (terms[3] + terms[4]) / 2) / 2
    new.requires_grad_()
    loss = trajectory_loss(new, old, base, advantage, row, step, clip=0.2, kl=0.1)
    assert abs(loss.item() - due) < 1e-6
    loss.backward()
    assert new.grad is not None and new.grad[2] < 0 < new.grad[4]  # descent follows the advantages
    rewards = torch.tensor([[0.0, 1.0], [0.3, 0.3]])
    assert torch.allclose(advantages(rewards), torch.tensor([[-1.0, 1.0], [0.0, 0.0]]), atol=1e-3)


def test_states_are_those_in_which_the_tokens_were_decided() -> None:
    """At temperature 0, every token is the likeliest in the state of its forward pass, and in no other."""
    pipe = MMSpecPipeline.from_pretrained(
        ASSETS / "scenes-diffusion", accelerator="low_confidence", denoising_steps=3
    )
    model: Any = pipe.model
    torch.manual_seed(0)
    for weight in model.model.language_model.layers.parameters():  # so that its tokens depend on the state
        weight.data += 0.5 * weight.std() * torch.randn_like(weight)
    learner = TrajectoryLoss(pipe)
    scenes = [sample_scene(seed) for seed in (20_003, 20_004)]
    _, (prompt, tokens, step) = learner.decode(scenes, 0, temperature=0.0, most=40)
    said: Any = pipe(DESCRIPTION_PROMPT, images=render(scenes[1]), max_new_tokens=40)
    assert tokens[1, :40].tolist()[: len(said.tokens[0])] == said.tokens[0]
    pixels = image_pixels(scenes, CANVAS)
    with torch.no_grad():
        visual = visual_tokens(model, patch_states(learner.reader.tower.module, pixels))
        at_once = masked_states(step, prompt.shape[1], 16)  # as if the first pass decided the whole block
        assert torch.equal(at_once, (step // 3 * 3).where(step >= 0, -1))
        for passes, is_right in ((step, True), (at_once, False)):
            layout, _ = states_layout(prompt, tokens, passes, model.config.text_config.mask_token_id, 16)
            likeliest = learner.reader.logits(layout, visual).argmax(-1)
            assert bool((likeliest == layout.goal).all()) is is_right
            assert len(layout.goal) == int((step >= 0).sum())


def test_reward_is_the_share_of_right_sentences() -> None:
    scene = sample_scene(20_000)
    text = describe(scene)
    first, *others = text.split(". ")
    assert share_right(text, scene) == 1.0
    assert share_right(". ".join(["something else", *others]), scene) == len(others) / (len(others) + 1)
