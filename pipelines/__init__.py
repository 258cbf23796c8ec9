"""Pipelines, the interface for users. Thin: the decoding loops are in mmspec.decoding."""

from mmspec.pipelines.base import MMSpecPipeline
from mmspec.pipelines.image_tokens import ImagePipeline
from mmspec.pipelines.outputs import ImageOutput, TextOutput
from mmspec.pipelines.vision_language import VisionLanguagePipeline

__all__ = ["ImageOutput", "ImagePipeline", "MMSpecPipeline", "TextOutput", "VisionLanguagePipeline"]
