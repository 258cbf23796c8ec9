"""Speculative and parallel decoding for multimodal models.

Public names are resolved on first use: importing this package imports neither torch nor transformers.
"""

from __future__ import annotations

import importlib
import logging
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mmspec.accelerators import list_accelerators
    from mmspec.core.statistics import DecodingStats
    from mmspec.errors import InputError, MMSpecError
    from mmspec.media.images import image_grid
    from mmspec.media.limits import MediaLimits
    from mmspec.pipelines import (
        ContinuousImagePipeline,
        ImageOutput,
        ImagePipeline,
        MMSpecPipeline,
        SpeechOutput,
        SpeechPipeline,
        TextOutput,
        VisionLanguagePipeline,
    )
    from mmspec.pipelines.custom_generate import accelerate
    from mmspec.pipelines.in_place import disable, enable, summary
    from mmspec.pipelines.response_format import grammar_processor

__version__ = "0.1.0.dev0"

__all__ = [
    "ContinuousImagePipeline",
    "DecodingStats",
    "ImageOutput",
    "ImagePipeline",
    "InputError",
    "MMSpecError",
    "MMSpecPipeline",
    "MediaLimits",
    "SpeechOutput",
    "SpeechPipeline",
    "TextOutput",
    "VisionLanguagePipeline",
    "__version__",
    "accelerate",
    "disable",
    "enable",
    "grammar_processor",
    "image_grid",
    "list_accelerators",
    "summary",
]

_LOCATIONS = {
    "ContinuousImagePipeline": "mmspec.pipelines",
    "DecodingStats": "mmspec.core.statistics",
    "ImageOutput": "mmspec.pipelines",
    "ImagePipeline": "mmspec.pipelines",
    "InputError": "mmspec.errors",
    "MMSpecError": "mmspec.errors",
    "MMSpecPipeline": "mmspec.pipelines",
    "MediaLimits": "mmspec.media.limits",
    "SpeechOutput": "mmspec.pipelines",
    "SpeechPipeline": "mmspec.pipelines",
    "TextOutput": "mmspec.pipelines",
    "VisionLanguagePipeline": "mmspec.pipelines",
    "accelerate": "mmspec.pipelines.custom_generate",
    "disable": "mmspec.pipelines.in_place",
    "enable": "mmspec.pipelines.in_place",
    "grammar_processor": "mmspec.pipelines.response_format",
    "image_grid": "mmspec.media.images",
    "list_accelerators": "mmspec.accelerators",
    "summary": "mmspec.pipelines.in_place",
}

logging.getLogger("mmspec").addHandler(logging.NullHandler())


def __getattr__(name: str) -> object:
    if name not in _LOCATIONS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_LOCATIONS[name]), name)
    globals()[name] = value  # later accesses skip this function
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
