"""Targets: adapters from loaded models to the Target interface of the decoding loop."""

from typing import Any, TypeAlias

from mmspec.core.interfaces import Target
from mmspec.targets.causal import CausalTarget
from mmspec.targets.image_tokens import ImageTokenTarget
from mmspec.targets.vision_language import VisionLanguageTarget, adapt

__all__ = ["AnyTarget", "CausalTarget", "ImageTokenTarget", "VisionLanguageTarget", "adapt"]

#: A target whose kind of state does not matter.
AnyTarget: TypeAlias = Target[Any]
