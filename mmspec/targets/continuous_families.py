"""Table of targets that draw images of continuous tokens, by the `model_type` of a config."""

from __future__ import annotations

from typing import Any

from transformers import PreTrainedModel

from mmspec.errors import InputError
from mmspec.models.denoising import DenoisingHead
from mmspec.registry import Registry

__all__ = ["CONTINUOUS_FAMILIES", "check_same_latents", "continuous_target"]

CONTINUOUS_FAMILIES: Registry[type[Any]] = Registry(
    "family",
    {"nextstep": "mmspec.targets.nextstep:NextStepTarget", "mar": "mmspec.targets.mar:MARTarget"},
)


def continuous_target(model: PreTrainedModel) -> Any | None:
    """Build the target that draws continuous tokens with this model; None if the model draws none."""
    family = str(model.config.model_type)
    return CONTINUOUS_FAMILIES[family](model) if family in CONTINUOUS_FAMILIES else None


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
