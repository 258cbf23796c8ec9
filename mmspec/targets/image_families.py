"""Table of image-token targets, by the `model_type` of a config or the name of a family."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from mmspec.registry import Registry
from mmspec.targets.image_tokens import ImageTokenTarget

__all__ = ["IMAGE_FAMILIES", "image_target"]

LUMINA_CLASS = "ChameleonXLLMX"

#: Families by name; those of transformers and our own are named as their `model_type`.
IMAGE_FAMILIES: Registry[type[Any]] = Registry(
    "family",
    {
        "llamagen": "mmspec.targets.llamagen:LlamaGenTarget",
        "janus": "mmspec.targets.janus:JanusTarget",
        "emu3": "mmspec.targets.emu3:Emu3Target",
        "Emu3": "mmspec.targets.emu3_5:Emu3p5Target",  # the published name of Emu3.5's model type
        "chameleon": "mmspec.targets.chameleon:AnoleTarget",
        "lumina_mgpt": "mmspec.targets.chameleon:LuminaTarget",
    },
)


def image_target(
    model: PreTrainedModel, vq: Any = None, *, codebook: Tensor | None = None, family: str | None = None
) -> ImageTokenTarget | None:
    """Build the target that draws images with this model; None if the model draws none.

    Args:
        model: a loaded model.
        vq: its image tokenizer where that is a model of its own (LlamaGen, Chameleon): diffusers' `VQModel`.
        codebook: [K, d] code vectors for rules that measure distances; None takes those of the tokenizer.
        family: a name in `IMAGE_FAMILIES`; None reads it from the config.

    Raises:
        InputError: no such family, or it cannot use an argument.
        CheckpointError: tokenizer, codebook and vocabulary do not fit each other.
        UnsupportedModelError: the model cannot be decoded speculatively.
    """
    name = family_of(model) if family is None else family
    if family is None and name not in IMAGE_FAMILIES:
        return None
    target: ImageTokenTarget = IMAGE_FAMILIES[name](model, vq, codebook)
    return target


def family_of(model: PreTrainedModel) -> str:
    """Name of a model's family; Lumina-mGPT differs from Chameleon only in its class or its folder."""
    config = model.config
    if config.model_type == "chameleon":
        by_class = any(name.startswith(LUMINA_CLASS) for name in config.architectures or [])
        if by_class or "lumina" in Path(config.name_or_path or "").name.lower():
            return "lumina_mgpt"
    return str(config.model_type)
