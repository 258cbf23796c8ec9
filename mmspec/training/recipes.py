"""Training recipes of heads: model class, loss class, and their settings."""

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
from mmspec.plugins import HEADS, METHODS, Head
from mmspec.registry import did_you_mean, require_known
from mmspec.targets import CausalTarget
from mmspec.training.losses.base import DrafterLoss

__all__ = ["RECIPES", "Recipe", "check_method", "written"]

FROM_TARGET = ("layer", "vocabulary", "hidden_size")  # and every name that begins with `target_`


@dataclass(frozen=True)
class Recipe:
    """A drafter that can be trained: a head, its loss, and default settings.

    Attributes:
        accelerator: the name of the head in `HEADS`, which is also the name of its accelerator.
        settings: default settings of its config and its loss.
        loss: "module:attribute" of a loss that replaces the head's own.
    """

    accelerator: str
    settings: Mapping[str, object] = field(default_factory=dict)
    loss: str | None = None

    @property
    def record(self) -> Head:
        """The entry of the head in `HEADS`, with this recipe's loss."""
        own = HEADS[self.accelerator]
        return own if self.loss is None else replace(own, loss=self.loss)

    @property
    def head(self) -> type[PreTrainedModel]:
        """The model class. Its config class has `for_target`, which creates a config for a target."""
        model: type[PreTrainedModel] = self.record.load("model")
        return model

    @property
    def learner(self) -> type[DrafterLoss]:
        """The loss class. Its keyword-only arguments are settings, like the fields of the config."""
        loss: type[DrafterLoss] = self.record.load("loss")
        return loss

    def drafter(self, model: nn.Module) -> Drafter:
        """Create a drafter from the model, to measure tokens per forward pass on held-out prompts."""
        drafter: Drafter = METHODS[self.accelerator].drafter_class(model)
        return drafter

    def build(self, target: CausalTarget, **settings: object) -> PreTrainedModel:
        """Create the model for a target, with random weights.

        Raises:
            InputError: the model cannot be built with a setting.
        """
        of_images = self.record.image_settings if target.grid is not None else {}
        made = {**self.settings, **of_images, **settings}
        shape = {name: value for name, value in made.items() if name in self.of_head()}
        config: Any = self.head.config_class
        try:
            return self.head(config.for_target(target.config, target.vocabulary, **shape))
        except StrictDataclassError as error:
            raise InputError("settings", made, f"are invalid: {error.__cause__ or error}") from error

    def learn(self, model: nn.Module, target: CausalTarget, **settings: object) -> DrafterLoss:
        """Create the loss module that trains the model."""
        made = {**self.settings, **settings}
        own = {name: value for name, value in made.items() if name in self.of_learner()}
        return self.learner(model, target, **own)

    def of_head(self) -> set[str]:
        """Names of the model's settings: the fields of its config that do not depend on the target."""
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
"""Recipes by name: that of a head, or of a variant of its training."""


def check_method(name: str, settings: Mapping[str, object]) -> None:
    """Check the names of a method and its settings, before anything is loaded.

    Raises:
        InputError: the method does not exist; the message names the nearest.
        UnknownArgumentError: the method does not have a setting.
    """
    require_known("method", name, RECIPES)
    known = RECIPES[name].of_head() | RECIPES[name].of_learner()
    for setting in settings:
        if setting not in known:
            raise UnknownArgumentError(f"setting of {name}", setting, did_you_mean(setting, known))


def written(name: str, settings: Mapping[str, object]) -> str:
    """A method with its settings in command line syntax: `flash:block=10:compressor=latent`."""
    parts = [name]
    for setting, value in settings.items():
        table = value if isinstance(value, Mapping) else {"": value}
        parts += [
            f"{setting}{'.' if key else ''}{key}={each if isinstance(each, str) else json.dumps(each)}"
            for key, each in table.items()
        ]
    return ":".join(parts)
