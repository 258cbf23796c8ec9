"""Methods with settings: available settings, their effects on the model, and their syntax."""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from mmspec.core.sampling import Sampler
from mmspec.errors import UnknownArgumentError
from mmspec.targets import CausalTarget
from mmspec.training.drafter import train_drafter
from mmspec.training.recipes import RECIPES, check_method
from tests.methods.flash_checks import answer, inputs_of, target_of
from tests.tiny_models import tiny_llama
from tests.training.own_answers import CASES, own_answers


@functools.cache
def target() -> CausalTarget:
    return CausalTarget(tiny_llama(vocab=12))


def test_defaults_are_settings_that_exist() -> None:
    for name, method in RECIPES.items():
        check_method(name, {**method.settings, **method.record.image_settings})
        assert method.build(target()).config.vocabulary == 12, name


def test_unknown_settings_are_refused_before_anything_is_read(tmp_path: Path) -> None:
    for setting in ("blok", "vocabulary", "target_type", "model_type", "head"):
        with pytest.raises(UnknownArgumentError, match=r"block, .*compressor") as caught:
            train_drafter(tmp_path, tmp_path / "out", [], method="flash", settings={setting: 3}, steps=1)
        assert ("did you mean 'block'?" in str(caught.value)) == (setting == "blok")


LEARNT_FROM_TEXT = [name for name, method in RECIPES.items() if not method.record.of_images]


@pytest.mark.parametrize("name", LEARNT_FROM_TEXT)
@pytest.mark.every(6)
def test_the_head_learns_and_the_target_does_not(name: str) -> None:
    """All weights of the head learn from outputs of its target, so that more drafts are accepted."""
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
    gain = {"ppd": 0.1, "lilicorr": 0.1}.get(name, 0.3)  # three embeddings learn little, and blocks slowly
    assert acceptance() > untrained + gain or name == "dflash", "which learns whole blocks, and slowly"
    assert all(torch.equal(value, before[key]) for key, value in target.model.named_parameters())
    assert all(value.grad is None for value in target.model.parameters())
