"""The shape of image models that predict many cells in a forward: that of LlamaGen, with additions."""

from __future__ import annotations

from huggingface_hub.dataclasses import strict

from mmspec.families.llamagen.configuration import LlamaGenConfig

__all__ = ["ParallelImageConfig"]


@strict
class ParallelImageConfig(LlamaGenConfig):
    """Base of the shapes of image models that predict many cells in a forward."""

    model_type = "parallel_image"
