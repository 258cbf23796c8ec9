"""Pipelines: what users call. Thin; the work is in mmspec.decoding."""

from mmspec.pipelines.base import MMSpecPipeline
from mmspec.pipelines.outputs import TextOutput
from mmspec.pipelines.vision_language import VisionLanguagePipeline

__all__ = ["MMSpecPipeline", "TextOutput", "VisionLanguagePipeline"]
