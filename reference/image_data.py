"""Training data of the image models: images of scenes with large objects, their labels and their prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from mmspec.scenes import (
    BACKGROUNDS,
    COLOURS,
    IMAGE_TOKENS,
    PATTERNS,
    SHAPES,
    SIZES,
    ImagePrompt,
    object_masks,
    sample_scene,
)
from mmspec.training.data.images import DROPPED
from mmspec.training.data.scenes import PromptedScenes, image_pixels
from mmspec.training.data.sequences import TensorBatch
from reference.vlm_data import IGNORED, patch_labels

__all__ = [
    "CAPTION_CLASSES",
    "CLASSES",
    "GRID",
    "IMAGE_SIZE",
    "READER_PATCH",
    "ImageBatch",
    "PixelBatch",
    "image_batch",
    "pixel_batch",
]

IMAGE_SIZE = 64
READER_PATCH = 8
STRIDE = 4  # side of a token in pixels
GRID = IMAGE_SIZE // STRIDE
CLASSES = len(COLOURS) * len(SHAPES)

ATTRIBUTES = {"size": SIZES, "colour": COLOURS, "pattern": PATTERNS, "shape": SHAPES}
CAPTION_CLASSES = {
    f"{name} {place}": len(values) for place in (1, 2) for name, values in ATTRIBUTES.items()
} | {"background": len(BACKGROUNDS), "count": 2}
"""Number of classes of each label of a prompt. The objects are numbered from left to right."""


@dataclass(frozen=True)
class PixelBatch(TensorBatch):
    """Images `[B, 3, 64, 64]` in [-1, 1], and the weights of their pixels `[B, 1, 64, 64]`."""

    pixels: torch.Tensor
    weights: torch.Tensor


@dataclass(frozen=True)
class ImageBatch(TensorBatch):
    """B images with their prompts, and P prompts without images.

    Attributes:
        pixels: [B, 3, s, s] in [-1, 1].
        tokens: [B, cells] of the image tokenizer; [B, 0] before the images are encoded.
        words, word_mask: [B + P, `CAPTION_LENGTH`] tokens of the prompts. Padding is on the left.
        dropped: [B + P] rows without a condition.
        caption_labels: [B + P, len(CAPTION_CLASSES)] labels of the auxiliary loss on prompts.
        place_labels: [B, cells, len(PATCH_CLASSES)] labels of the auxiliary loss on places.
        class_labels: [B] below 48.
    """

    pixels: torch.Tensor
    tokens: torch.Tensor
    words: torch.Tensor
    word_mask: torch.Tensor
    dropped: torch.Tensor
    caption_labels: torch.Tensor
    place_labels: torch.Tensor
    class_labels: torch.Tensor


def pixel_batch(seeds: np.ndarray, object_weight: float = 1.0) -> PixelBatch:
    """Make images in which pixels of objects have `object_weight` times the weight of the background."""
    scenes = [sample_scene(int(seed), profile=IMAGE_TOKENS) for seed in seeds]
    on_objects = np.stack([object_masks(scene, IMAGE_SIZE).any(axis=0) for scene in scenes])
    weights = torch.from_numpy(on_objects)[:, None].float() * (object_weight - 1) + 1
    return PixelBatch(image_pixels(scenes, IMAGE_SIZE), weights)


def image_batch(
    seeds: np.ndarray,
    tokenizer: PreTrainedTokenizerBase,
    *,
    dropped: float = DROPPED,
    only_prompts: int = 0,
    objects: int | None = None,
    grid: int = GRID,
) -> ImageBatch:
    """Make images with prompts.

    Args:
        seeds: seeds of the scenes.
        tokenizer: tokenizer of the prompts.
        dropped: share of the images whose prompts are dropped.
        only_prompts: number of scenes, at the end, that contribute a prompt without an image.
        objects: objects per scene; None for one or two.
        grid: tokens per side, each of `STRIDE` x `STRIDE` pixels.
    """
    told = PromptedScenes.of(seeds, dropped=dropped, objects=objects, kept=only_prompts)
    shown, size = told.scenes[: len(seeds) - only_prompts], grid * STRIDE
    words, mask = told.words(tokenizer)
    return ImageBatch(
        pixels=image_pixels(shown, size),
        tokens=torch.empty(len(shown), 0, dtype=torch.long),
        words=words,
        word_mask=mask,
        dropped=told.dropped,
        caption_labels=torch.tensor([_caption_labels(prompt) for prompt in told.prompts]),
        place_labels=torch.from_numpy(np.stack([patch_labels(scene, STRIDE, size) for scene in shown])),
        class_labels=torch.tensor([scene.class_label for scene in shown]),
    )


def _caption_labels(prompt: ImagePrompt) -> list[int]:
    labels = []
    for index in range(2):
        said = prompt.objects[index] if index < len(prompt.objects) and prompt.ordered else (None,) * 4
        labels += [
            IGNORED if value is None else values.index(value)
            for value, values in zip(said, ATTRIBUTES.values(), strict=True)
        ]
    background = IGNORED if prompt.background is None else BACKGROUNDS.index(prompt.background)
    return [*labels, background, len(prompt.objects) - 1]
