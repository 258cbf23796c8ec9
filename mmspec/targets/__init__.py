"""Targets: adapters that give a model the interface of the speculative loop."""

from mmspec.targets.causal import CausalTarget
from mmspec.targets.image_families import image_target
from mmspec.targets.image_tokens import ImageTokenTarget
from mmspec.targets.vision_language import VisionLanguageTarget

__all__ = ["CausalTarget", "ImageTokenTarget", "VisionLanguageTarget", "image_target"]
