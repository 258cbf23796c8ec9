"""Targets: adapters from loaded models to the `Target` interface of the decoding loop."""

from mmspec.core.interfaces import AnyTarget
from mmspec.targets.causal import CausalTarget
from mmspec.targets.image_tokens import ImageTokenTarget
from mmspec.targets.vision_language import VisionLanguageTarget, adapt

__all__ = ["AnyTarget", "CausalTarget", "ImageTokenTarget", "VisionLanguageTarget", "adapt"]
