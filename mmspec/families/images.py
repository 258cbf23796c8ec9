"""Targets of image models, by family."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from mmspec.errors import InputError
from mmspec.plugins import family_of, load
from mmspec.targets.image_tokens import AnyVQ, ImageTokenTarget
from mmspec.vectors.denoising_head import DenoisingHead

if TYPE_CHECKING:  # importing them takes seconds, and at most one is needed
    from mmspec.families.mar.target import MARTarget
    from mmspec.families.nextstep.target import NextStepTarget

__all__ = ["VectorTarget", "check_same_latents", "continuous_target", "image_target"]

#: A target that draws continuous tokens.
VectorTarget: TypeAlias = "MARTarget | NextStepTarget"


def image_target(
    model: PreTrainedModel, vq: AnyVQ = None, *, codebook: Tensor | None = None
) -> ImageTokenTarget | None:
    """Build the target of a model that draws images of discrete tokens; None for other models.

    Args:
        model: a loaded model.
        vq: the image tokenizer, if it is a separate model (LlamaGen, Chameleon): diffusers' `VQModel`.
        codebook: [K, d] code vectors for rules that measure distances; None for those of the tokenizer.

    Raises:
        InputError: the family cannot use an argument.
        CheckpointError: tokenizer, codebook and vocabulary do not fit each other.
        UnsupportedModelError: the model cannot be decoded speculatively.
    """
    family = family_of(model.config)
    if family is None or family.draws != "tokens":
        return None
    target: ImageTokenTarget = load(family.target)(model, vq, codebook)
    return target


def continuous_target(model: PreTrainedModel) -> VectorTarget | None:
    """Build the target of a model that draws continuous tokens; None for other models."""
    family = family_of(model.config)
    if family is None or family.draws != "vectors":
        return None
    target: VectorTarget = load(family.target)(model)
    return target


def check_same_latents(
    target: VectorTarget, draft: VectorTarget, scalings: tuple[object, object] = (None, None)
) -> None:
    """Raise InputError unless a draft model and the target predict the same tokens.

    Args:
        target, draft: targets of continuous tokens.
        scalings: factor and shift that normalise the latents of each, if both are known.
    """
    own, other = (described(each) for each in (target, draft))
    if None not in scalings:
        own["scaling and shift of latents"], other["scaling and shift of latents"] = scalings
    for name, value in own.items():
        if other[name] != value:
            rule = f"must be a draft model with the target's {name}: {value}"
            raise InputError("drafter", f"{name}: {other[name]}", rule)


def described(target: VectorTarget) -> dict[str, object]:
    """Properties that a target and its draft model must have in common."""
    head: DenoisingHead = target.denoiser
    return {
        "family": target.model.config.model_type,
        "size of tokens": target.vector_size,
        "noise schedule": head.config.kind,
        "image": f"{target.grid.rows} x {target.grid.columns} tokens",
    }
