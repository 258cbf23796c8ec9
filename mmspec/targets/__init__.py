"""Targets: adapters from loaded models to the Target interface of the decoding loops."""

from mmspec.targets.causal import CausalTarget
from mmspec.targets.image_families import image_target
from mmspec.targets.image_tokens import ImageTokenTarget
from mmspec.targets.masked import MaskedTarget
from mmspec.targets.vision_language import VisionLanguageTarget, adapt

__all__ = [
    "CausalTarget",
    "ImageTokenTarget",
    "MaskedTarget",
    "VisionLanguageTarget",
    "adapt",
    "image_target",
]
