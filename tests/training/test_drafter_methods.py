"""Methods with settings: what exists, what it does to the model, and how it is written."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from mmspec.cli.choice import parse_options
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.targets import CausalTarget
from mmspec.training.drafter import train_drafter
from mmspec.training.losses.eagle import EagleLoss
from mmspec.training.methods import METHODS, Method, check_method, written
from tests.tiny_models import tiny_llama


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
    head = METHODS["flash"].build(target(), **SETTINGS)
    assert {name: getattr(head.config, name) for name in SETTINGS} == SETTINGS
    assert head.config.hidden_size == target().config.hidden_size


def test_what_is_written_is_read_again() -> None:
    text = written("flash", SETTINGS)
    assert text == "flash:block=3:compressor=pooling:compressor_options.tokens=4:rope_theta=500.5"
    assert parse_options("method", text) == ("flash", SETTINGS)


@pytest.mark.parametrize("name", METHODS)
def test_defaults_are_settings_that_exist(name: str) -> None:
    check_method(name, {**METHODS[name].settings, **METHODS[name].record.image_settings})
    assert METHODS[name].build(target()).config.vocabulary == 12


@pytest.mark.parametrize("setting", ["blok", "vocabulary", "target_type", "model_type", "head"])
def test_unknown_settings_are_refused_before_anything_is_read(setting: str, tmp_path: Path) -> None:
    with pytest.raises(UnknownArgumentError, match=r"block, .*compressor") as caught:
        train_drafter(
            tmp_path / "nowhere", tmp_path / "out", [], method="flash", settings={setting: 3}, steps=1
        )
    assert ("did you mean 'block'?" in str(caught.value)) == (setting == "blok")


@pytest.mark.parametrize("settings", [{"block": 99}, {"block": "three"}, {"compressor": "pool"}])
def test_values_that_cannot_be_are_refused(settings: dict[str, object]) -> None:
    with pytest.raises(InputError, match=str(*settings)):
        METHODS["flash"].build(target(), **settings)


class NoisyLoss(EagleLoss):
    def __init__(self, head: Any, target: CausalTarget, *, noise: float = 0.2) -> None:
        super().__init__(head, target)
        self.noise = noise


def test_keywords_of_the_loss_are_settings_too() -> None:
    method = Method("eagle", {"noise": 0.1, "depth": 2}, f"{__name__}:NoisyLoss")
    model = method.build(target(), noise=0.3, top_k=5)
    assert (model.config.depth, model.config.top_k) == (2, 5)
    assert method.learn(model, target(), top_k=5).noise == 0.1
    assert method.learn(model, target(), noise=0.3).noise == 0.3


def test_every_method_is_run_by_an_accelerator() -> None:
    assert {name: method.accelerator for name, method in METHODS.items()} == {
        name: "eagle" if name in ("msd", "specvlm", "vispec") else name for name in METHODS
    }
