"""Pipelines: load a checkpoint; generate text or images, or transcribe speech. Loops are in `mmspec.core`."""

from mmspec.pipelines.base import MMSpecPipeline
from mmspec.pipelines.continuous_images import ContinuousImagePipeline
from mmspec.pipelines.image_generation import ImageGenerationPipeline
from mmspec.pipelines.image_tokens import ImagePipeline
from mmspec.pipelines.outputs import ImageOutput, SpeechOutput, TextOutput
from mmspec.pipelines.speech import SpeechPipeline
from mmspec.pipelines.vision_language import VisionLanguagePipeline

__all__ = [
    "ContinuousImagePipeline",
    "ImageGenerationPipeline",
    "ImageOutput",
    "ImagePipeline",
    "MMSpecPipeline",
    "SpeechOutput",
    "SpeechPipeline",
    "TextOutput",
    "VisionLanguagePipeline",
]
