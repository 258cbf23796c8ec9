"""Targets: adapters that give a model the interface of the speculative loop."""

from mmspec.targets.causal import CausalTarget
from mmspec.targets.vision_language import VisionLanguageTarget

__all__ = ["CausalTarget", "VisionLanguageTarget"]
