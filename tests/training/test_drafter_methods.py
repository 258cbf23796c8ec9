"""Methods with settings: what exists, what it does to the model, and how it is written."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.core.sampling import Sampler
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.methods.eagle.loss import EagleLoss
from mmspec.registry import parse_options
from mmspec.targets import CausalTarget
from mmspec.training.drafter import train_drafter
from mmspec.training.recipes import RECIPES, Recipe, check_method, written
from tests.methods.flash_checks import answer, inputs_of, target_of
from tests.tiny_models import tiny_llama
from tests.training.own_answers import CASES, own_answers


@functools.cache
def target() -> CausalTarget:
    return CausalTarget(tiny_llama(vocab=12))


SETTINGS: Mapping[str, Any] = {
    "block": 3,
    "compressor": "pooling",
    "compressor_options": {"tokens": 4},
    "rope_theta": 500.5,
}


def test_settings_reach_the_model() -> None:
    head = RECIPES["flash"].build(target(), **SETTINGS)
    assert {name: getattr(head.config, name) for name in SETTINGS} == SETTINGS
    assert head.config.hidden_size == target().config.hidden_size


def test_what_is_written_is_read_again() -> None:
    text = written("flash", SETTINGS)
    assert text == "flash:block=3:compressor=pooling:compressor_options.tokens=4:rope_theta=500.5"
    assert parse_options("method", text) == ("flash", SETTINGS)


def test_defaults_are_settings_that_exist() -> None:
    for name, method in RECIPES.items():
        check_method(name, {**method.settings, **method.record.image_settings})
        assert method.build(target()).config.vocabulary == 12, name


def test_unknown_settings_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    for setting in ("blok", "vocabulary", "target_type", "model_type", "head"):
        with pytest.raises(UnknownArgumentError, match=r"block, .*compressor") as caught:
            train_drafter(tmp_path, tmp_path / "out", [], method="flash", settings={setting: 3}, steps=1)
        assert ("did you mean 'block'?" in str(caught.value)) == (setting == "blok")


def test_values_that_cannot_be_are_refused() -> None:
    for settings in ({"block": 99}, {"block": "three"}, {"compressor": "pool"}):
        with pytest.raises(InputError, match=str(*settings)):
            RECIPES["flash"].build(target(), **settings)


LEARNT_FROM_TEXT = [name for name, method in RECIPES.items() if not method.record.of_images]


@pytest.mark.parametrize("name", LEARNT_FROM_TEXT)
@pytest.mark.every(6)
def test_the_head_learns_and_the_target_does_not(name: str) -> None:
    """Every weight of it, from its target's own words, so that more of its drafts are accepted."""
    target, given = target_of("llava"), own_answers(dtype=torch.float32, new_tokens=24)
    torch.manual_seed(0)
    model: Any = RECIPES[name].build(target).train()
    learner = RECIPES[name].learn(model, target)
    before = {key: value.clone() for key, value in target.model.named_parameters()}
    assert {key.split(".")[0] for key, _ in learner.named_parameters()} == {"head"}
    for examples in (given.examples, given.examples[1:2]):
        model.zero_grad()
        learner(replace(given, examples=examples))[0].backward()
        missed = {key for key, value in model.named_parameters() if value.grad is None}
        assert not missed, "several processes wait for every gradient, images or not"
    prompts = [inputs_of("llava")[case] for case in CASES]

    def acceptance() -> float:
        drafter: Any = RECIPES[name].drafter(model.eval())
        length = answer(target, drafter.fit(target), prompts, Sampler(), 24).stats.acceptance_length
        model.train()
        return float(length)

    untrained, losses, optimizer = acceptance(), [], torch.optim.Adam(model.parameters(), lr=1e-2)
    for _ in range(20):
        optimizer.zero_grad()
        loss, _ = learner(given)
        loss.backward()
        losses.append(loss.item())
        optimizer.step()
    assert losses[-1] < 0.9 * losses[0]
    gain = 0.1 if name == "ppd" else 0.3  # three embeddings are little to learn
    assert acceptance() > untrained + gain or name == "dflash", "which learns whole blocks, and slowly"
    assert all(torch.equal(value, before[key]) for key, value in target.model.named_parameters())
    assert all(value.grad is None for value in target.model.parameters())


class NoisyLoss(EagleLoss):
    def __init__(self, head: Any, target: CausalTarget, *, noise: float = 0.2) -> None:
        super().__init__(head, target)
        self.noise = noise


def test_keywords_of_the_loss_are_settings_too() -> None:
    method = Recipe("eagle", {"noise": 0.1, "depth": 2}, f"{__name__}:NoisyLoss")
    model = method.build(target(), noise=0.3, top_k=5)
    assert (model.config.depth, model.config.top_k) == (2, 5)
    assert method.learn(model, target(), top_k=5).noise == 0.1
    assert method.learn(model, target(), noise=0.3).noise == 0.3
