"""Recipes of trained heads: model, loss, and their settings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.core.interfaces import Drafter
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.plugins import HEADS, Head
from mmspec.registry import did_you_mean
from mmspec.targets import CausalTarget
from mmspec.training.losses.base import DrafterLoss

__all__ = ["RECIPES", "Recipe", "check_method", "written"]

FROM_TARGET = ("layer", "vocabulary", "hidden_size")  # and all that begins with `target_`


@dataclass(frozen=True)
class Recipe:
    """A drafter that can be trained: a head with settings, and its loss.

    Attributes:
        accelerator: the name of the head in `HEADS`, under which its drafter runs.
        settings: of its config and of its loss, where nothing else is asked for.
        loss: "module:attribute" of another loss than the head's own.
    """

    accelerator: str
    settings: Mapping[str, object] = field(default_factory=dict)
    loss: str | None = None

    @property
    def record(self) -> Head:
        """The record of the head."""
        own = HEADS[self.accelerator]
        return own if self.loss is None else replace(own, loss=self.loss)

    @property
    def head(self) -> type[PreTrainedModel]:
        """The class of the model. Its config class has `for_target`, which makes a config for a target."""
        model: type[PreTrainedModel] = self.record.load("model")
        return model

    @property
    def learner(self) -> type[DrafterLoss]:
        """The class of the loss. Its keyword-only arguments are settings, beside the fields of the config."""
        loss: type[DrafterLoss] = self.record.load("loss")
        return loss

    def drafter(self, model: nn.Module) -> Drafter:
        """Make a drafter of the model, to measure the acceptance length on held-out prompts."""
        drafter: Drafter = self.record.load("drafter")(model)
        return drafter

    def build(self, target: CausalTarget, **settings: object) -> PreTrainedModel:
        """Make the model for a target, with random weights.

        Raises:
            InputError: a value that it cannot be built with.
        """
        of_images = self.record.image_settings if target.grid is not None else {}
        made = {**self.settings, **of_images, **settings}
        shape = {name: value for name, value in made.items() if name in self.of_head()}
        config: Any = self.head.config_class
        try:
            return self.head(config.for_target(target.config, target.vocabulary, **shape))
        except StrictDataclassError as error:
            raise InputError("settings", made, str(error.__cause__ or error)) from error

    def learn(self, model: nn.Module, target: CausalTarget, **settings: object) -> DrafterLoss:
        """Make the module that trains the model."""
        made = {**self.settings, **settings}
        own = {name: value for name, value in made.items() if name in self.of_learner()}
        return self.learner(model, target, **own)

    def of_head(self) -> set[str]:
        """Names of the settings of the model: the fields of its config that a target does not decide."""
        config: Any = self.head.config_class
        kinds = [kind for kind in config.__mro__ if issubclass(kind, PreTrainedConfig)]
        names = {name for kind in kinds[: kinds.index(PreTrainedConfig)] for name in kind.__annotations__}
        return {name for name in names if name not in FROM_TARGET and not name.startswith("target_")}

    def of_learner(self) -> set[str]:
        """Names of the settings of the loss."""
        parameters = inspect.signature(self.learner).parameters.values()
        return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


RECIPES = {name: Recipe(name) for name, head in HEADS.items() if head.loss is not None} | {
    name: Recipe(method, variant.settings, variant.loss)
    for method, head in HEADS.items()
    for name, variant in head.variants.items()
}
"""By name: that of the head, or of a variant of its training."""


def check_method(name: str, settings: Mapping[str, object]) -> None:
    """Refuse an unknown method or setting, before anything is loaded.

    Raises:
        InputError: no such method; the message holds the nearest.
        UnknownArgumentError: a setting that it does not have.
    """
    if name not in RECIPES:
        raise InputError("method", name, did_you_mean(name, RECIPES))
    known = RECIPES[name].of_head() | RECIPES[name].of_learner()
    for setting in settings:
        if setting not in known:
            raise UnknownArgumentError(f"setting of {name}", setting, did_you_mean(setting, known))


def written(name: str, settings: Mapping[str, object]) -> str:
    """A method with its settings as the command line takes them: `flash:block=10:compressor=latent`."""
    parts = [name]
    for setting, value in settings.items():
        table = value if isinstance(value, Mapping) else {"": value}
        parts += [
            f"{setting}{'.' if key else ''}{key}={each if isinstance(each, str) else json.dumps(each)}"
            for key, each in table.items()
        ]
    return ":".join(parts)
