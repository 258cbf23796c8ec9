"""Targets of models that draw images, by family."""

from __future__ import annotations

from typing import TYPE_CHECKING, TypeAlias

from torch import Tensor
from transformers import PreTrainedModel

from mmspec.errors import InputError
from mmspec.plugins import FAMILIES, family_of, load
from mmspec.registry import did_you_mean
from mmspec.targets.image_tokens import AnyVQ, ImageTokenTarget
from mmspec.vectors.denoising_head import DenoisingHead

if TYPE_CHECKING:  # they take seconds, and one of them is needed at most
    from mmspec.families.mar.target import MARTarget
    from mmspec.families.nextstep.target import NextStepTarget

__all__ = ["check_same_latents", "continuous_target", "image_target"]

#: A target that draws continuous tokens.
VectorTarget: TypeAlias = "MARTarget | NextStepTarget"


def image_target(
    model: PreTrainedModel, vq: AnyVQ = None, *, codebook: Tensor | None = None, family: str | None = None
) -> ImageTokenTarget | None:
    """Build the target that draws images of discrete tokens with this model; None if the model draws none.

    Args:
        model: a loaded model.
        vq: its image tokenizer where that is a model of its own (LlamaGen, Chameleon): diffusers' `VQModel`.
        codebook: [K, d] code vectors for rules that measure distances; None takes those of the tokenizer.
        family: a name in `FAMILIES`; None reads it from the config.

    Raises:
        InputError: no such family, or it cannot use an argument.
        CheckpointError: tokenizer, codebook and vocabulary do not fit each other.
        UnsupportedModelError: the model cannot be decoded speculatively.
    """
    found = family_of(model.config) if family is None else FAMILIES[family]
    if found is None or found.draws != "tokens":
        if family is None:
            return None
        drawing = [name for name, each in FAMILIES.items() if each.draws == "tokens"]
        raise InputError("family", family, did_you_mean(family, drawing))
    target: ImageTokenTarget = load(found.target)(model, vq, codebook)
    return target


def continuous_target(model: PreTrainedModel) -> VectorTarget | None:
    """Build the target that draws continuous tokens with this model; None if the model draws none."""
    family = family_of(model.config)
    if family is None or family.draws != "vectors":
        return None
    target: VectorTarget = load(family.target)(model)
    return target


def check_same_latents(
    target: VectorTarget, draft: VectorTarget, scalings: tuple[object, object] = (None, None)
) -> None:
    """Raise InputError unless a draft model predicts the tokens that the target predicts.

    Args:
        target, draft: targets of continuous tokens.
        scalings: factor and shift by which the latents of each are normalised, where both are known.
    """
    own, other = (described(each) for each in (target, draft))
    if None not in scalings:
        own["scaling and shift of latents"], other["scaling and shift of latents"] = scalings
    for name, value in own.items():
        if other[name] != value:
            allowed = f"a draft model of the target's {name}: {value}"
            raise InputError("drafter", f"{name}: {other[name]}", allowed)


def described(target: VectorTarget) -> dict[str, object]:
    """Properties that two models must have in common to judge each other's tokens."""
    head: DenoisingHead = target.denoiser
    return {
        "family": target.model.config.model_type,
        "size of tokens": target.vector_size,
        "noise schedule": head.config.kind,
        "image": f"{target.grid.rows} x {target.grid.columns} tokens",
    }
