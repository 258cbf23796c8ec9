"""The kinds of drafter that can be trained, and what of each can be set. Knows no data and no steps."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from huggingface_hub.errors import StrictDataclassError
from torch import nn
from transformers import PreTrainedConfig, PreTrainedModel

from mmspec.decoding.interfaces import Drafter
from mmspec.drafters import DRAFTERS
from mmspec.drafters.eagle import Eagle3Drafter, EagleDrafter
from mmspec.drafters.flash import FlashDrafter
from mmspec.drafters.hydra import HydraDrafter
from mmspec.drafters.medusa import MedusaDrafter
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.models.eagle import EagleHead
from mmspec.models.eagle3 import Eagle3Head
from mmspec.models.flash import FlashHead
from mmspec.models.hydra import HydraHead
from mmspec.models.medusa import MedusaHead
from mmspec.registry import did_you_mean
from mmspec.targets import CausalTarget, ImageTokenTarget
from mmspec.training.data.sequences import DrafterBatch, DrafterData
from mmspec.training.losses.eagle import EagleLoss
from mmspec.training.losses.eagle3 import Eagle3Loss, choose_vocabulary
from mmspec.training.losses.flash import FlashLoss
from mmspec.training.losses.hydra import HydraLoss
from mmspec.training.losses.medusa import MedusaLoss, hit_rates
from mmspec.training.losses.vispec import ViSpecLoss

__all__ = ["METHODS", "Method", "check_method", "written"]

IMAGE_TREE = {"num_draft_tokens": 60, "depth": 3, "top_k": 40}  # best of nine for scenes-llamagen
FROM_TARGET = ("layer", "vocabulary", "hidden_size")  # and all that begins with `target_`


@dataclass(frozen=True)
class Method:
    """A kind of drafter that can be trained.

    Attributes:
        head: its model, whose config's `for_target` makes the shape for a target.
        learner: `learner(model, target)` is what is trained: a module that holds the model, whose forward
            takes a `DrafterBatch` and gives the loss first, then figures. What it takes by keyword alone can
            be set, as can what the config has.
        drafter: the model as a drafter, for the acceptance length on held-out prompts.
        settings: where nothing else is asked for.
        images: where nothing else is asked for and the target draws images.
        prepare: `prepare(model, data)` is done once, before a new model learns; None is nothing.
        measure: `measure(learner, batches)`, of batches that were not learnt, is what the config of a trained
            model says besides; None is nothing.
    """

    head: type[PreTrainedModel]
    learner: Callable[..., nn.Module]
    drafter: Callable[[Any], Drafter]
    settings: Mapping[str, Any] = field(default_factory=dict)
    images: Mapping[str, Any] = field(default_factory=dict)
    prepare: Callable[[Any, DrafterData], None] | None = None
    measure: Callable[[Any, Iterable[DrafterBatch]], dict[str, Any]] | None = None

    @property
    def accelerator(self) -> str:
        """The accelerator that runs its drafters, which is named as they are in the registry."""
        return next(name for name in DRAFTERS if DRAFTERS[name] is self.drafter)

    def build(self, target: CausalTarget, **settings: Any) -> PreTrainedModel:
        """The model for a target, with random weights.

        Raises:
            InputError: a value that it cannot be built with.
        """
        images = self.images if isinstance(target, ImageTokenTarget) else {}
        made = {**self.settings, **images, **settings}
        shape = {name: value for name, value in made.items() if name in self.of_head()}
        config: Any = self.head.config_class
        try:
            return self.head(config.for_target(target.config, target.vocabulary, **shape))
        except StrictDataclassError as error:
            raise InputError("settings", made, str(error.__cause__ or error)) from error

    def learn(self, model: nn.Module, target: CausalTarget, **settings: Any) -> nn.Module:
        """The module that trains the model."""
        made = {**self.settings, **settings}
        return self.learner(
            model, target, **{name: value for name, value in made.items() if name in self.of_learner()}
        )

    def of_head(self) -> set[str]:
        """What can be set of the model: the attributes of its config that the target leaves open."""
        config: Any = self.head.config_class
        kinds = [kind for kind in config.__mro__ if issubclass(kind, PreTrainedConfig)]
        names = {name for kind in kinds[: kinds.index(PreTrainedConfig)] for name in kind.__annotations__}
        return {name for name in names if name not in FROM_TARGET and not name.startswith("target_")}

    def of_learner(self) -> set[str]:
        """What can be set of the loss."""
        parameters = inspect.signature(self.learner).parameters.values()
        return {parameter.name for parameter in parameters if parameter.kind is parameter.KEYWORD_ONLY}


def measure_heads(learner: Any, batches: Iterable[DrafterBatch]) -> dict[str, Any]:
    """How often each rank of several heads is right."""
    return {"hit_rates": hit_rates(learner, batches)}


METHODS = {
    "eagle": Method(EagleHead, EagleLoss, EagleDrafter, images=IMAGE_TREE),
    "eagle3": Method(Eagle3Head, Eagle3Loss, Eagle3Drafter, images=IMAGE_TREE, prepare=choose_vocabulary),
    "flash": Method(FlashHead, FlashLoss, FlashDrafter),
    "medusa": Method(MedusaHead, MedusaLoss, MedusaDrafter, measure=measure_heads),
    "hydra": Method(HydraHead, HydraLoss, HydraDrafter, measure=measure_heads),
    "msd": Method(EagleHead, EagleLoss, EagleDrafter, {"visual": "embedded"}),
    "specvlm": Method(EagleHead, EagleLoss, EagleDrafter, {"compressor": "gate"}),
    "vispec": Method(EagleHead, ViSpecLoss, EagleDrafter, {"visual": "embedded", "compressor": "vispec"}),
}
"""By name: that of the drafter in the registry, or of a way to read images that is EAGLE's otherwise."""


def check_method(name: str, settings: Mapping[str, Any]) -> None:
    """Refuse what does not exist, before anything is loaded.

    Raises:
        InputError: no such method; the message holds the nearest.
        UnknownArgumentError: a setting that it does not have.
    """
    if name not in METHODS:
        raise InputError("method", name, did_you_mean(name, METHODS))
    known = METHODS[name].of_head() | METHODS[name].of_learner()
    for setting in settings:
        if setting not in known:
            raise UnknownArgumentError(f"setting of {name}", setting, did_you_mean(setting, known))


def written(name: str, settings: Mapping[str, Any]) -> str:
    """A method with its settings as the command line takes them: `flash:block=10:compressor=latent`."""
    parts = [name]
    for setting, value in settings.items():
        table = value if isinstance(value, Mapping) else {"": value}
        parts += [
            f"{setting}{'.' if key else ''}{key}={each if isinstance(each, str) else json.dumps(each)}"
            for key, each in table.items()
        ]
    return ":".join(parts)
