"""Table of the families that draw images: one record for each, by the `model_type` of a config.

A family's prompts, sizes and published settings are on its target. Nothing is imported before it is asked
for.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from transformers import PreTrainedModel

from mmspec.errors import InputError
from mmspec.registry import did_you_mean
from mmspec.targets.image_tokens import ImageTokenTarget
from mmspec.vectors.denoising_head import DenoisingHead

__all__ = [
    "CONTINUOUS_FAMILIES",
    "FAMILIES",
    "IMAGE_FAMILIES",
    "Family",
    "check_same_latents",
    "continuous_target",
    "image_target",
]

TOKENS = "mmspec.pipelines.image_tokens:ImagePipeline"
VECTORS = "mmspec.pipelines.continuous_images:ContinuousImagePipeline"
LUMINA_CLASS = "ChameleonXLLMX"


@dataclass(frozen=True)
class Family:
    """Record of a family of models that draw images. Parts are named as "module:attribute".

    Attributes:
        target: its `Target`.
        pipeline: the pipeline that draws with it.
        answers: whether such a model also answers, which is then what it is loaded for.
        vq_apart: whether its image tokenizer is a model of its own.
    """

    target: str
    pipeline: str = TOKENS
    answers: bool = True
    vq_apart: bool = False

    def load(self, part: str) -> Any:
        """Import the part of that name: "target" or "pipeline"."""
        module, attribute = getattr(self, part).split(":")
        return getattr(importlib.import_module(module), attribute)


#: Families of discrete tokens; those of transformers and our own are named as their `model_type`.
IMAGE_FAMILIES = {
    "llamagen": Family("mmspec.families.llamagen.target:LlamaGenTarget", answers=False, vq_apart=True),
    "ctf": Family("mmspec.families.llamagen.coarse_target:CTFTarget", answers=False, vq_apart=True),
    **{
        name: Family(f"mmspec.families.parallel_images.target:{target}", answers=False, vq_apart=True)
        for name, target in {
            "lpd": "LPDTarget",
            "nar": "NARTarget",
            "par": "PARTarget",
            "nbp": "NBPTarget",
        }.items()
    },
    **{
        name: Family(f"mmspec.families.parallel_images.scale_target:{target}", answers=False, vq_apart=True)
        for name, target in {"var": "VARTarget", "nfig": "NFIGTarget"}.items()
    },
    "janus": Family("mmspec.families.janus.target:JanusTarget"),
    "emu3": Family("mmspec.families.emu3.target:Emu3Target"),
    "Emu3": Family(
        "mmspec.families.emu3.target:Emu3p5Target", vq_apart=True
    ),  # how Emu3.5 names its model type
    "chameleon": Family("mmspec.families.chameleon.target:AnoleTarget", vq_apart=True),
    "lumina_mgpt": Family("mmspec.families.chameleon.target:LuminaTarget", vq_apart=True),
}
#: Families whose tokens are vectors.
CONTINUOUS_FAMILIES = {
    "nextstep": Family("mmspec.families.nextstep.target:NextStepTarget", VECTORS, answers=False),
    "mar": Family("mmspec.families.mar.target:MARTarget", VECTORS, answers=False),
}
FAMILIES = {**IMAGE_FAMILIES, **CONTINUOUS_FAMILIES}


def image_target(
    model: PreTrainedModel, vq: Any = None, *, codebook: Tensor | None = None, family: str | None = None
) -> ImageTokenTarget | None:
    """Build the target that draws images of discrete tokens with this model; None if the model draws none.

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
    if name not in IMAGE_FAMILIES:
        if family is None:
            return None
        raise InputError("family", name, did_you_mean(name, IMAGE_FAMILIES))
    target: ImageTokenTarget = IMAGE_FAMILIES[name].load("target")(model, vq, codebook)
    return target


def family_of(model: PreTrainedModel) -> str:
    """Name of a model's family; Lumina-mGPT differs from Chameleon only in its class or its folder."""
    config = model.config
    if config.model_type == "chameleon":
        by_class = any(name.startswith(LUMINA_CLASS) for name in config.architectures or [])
        if by_class or "lumina" in Path(config.name_or_path or "").name.lower():
            return "lumina_mgpt"
    return str(config.model_type)


def continuous_target(model: PreTrainedModel) -> Any | None:
    """Build the target that draws continuous tokens with this model; None if the model draws none."""
    family = CONTINUOUS_FAMILIES.get(str(model.config.model_type))
    return None if family is None else family.load("target")(model)


def check_same_latents(target: Any, draft: Any, scalings: tuple[Any, Any] = (None, None)) -> None:
    """Raise InputError unless a draft model predicts the tokens that the target predicts.

    Args:
        target, draft: targets of `CONTINUOUS_FAMILIES`.
        scalings: factor and shift by which the latents of each are normalised, where both are known.
    """
    own, other = (described(each) for each in (target, draft))
    if None not in scalings:
        own["scaling and shift of latents"], other["scaling and shift of latents"] = scalings
    for name, value in own.items():
        if other[name] != value:
            allowed = f"a draft model of the target's {name}: {value}"
            raise InputError("drafter", f"{name}: {other[name]}", allowed)


def described(target: Any) -> dict[str, Any]:
    """Properties that two models must have in common to judge each other's tokens."""
    head: DenoisingHead = target.denoiser
    return {
        "family": target.model.config.model_type,
        "size of tokens": target.vector_size,
        "noise schedule": head.config.kind,
        "image": f"{target.grid.rows} x {target.grid.columns} tokens",
    }
