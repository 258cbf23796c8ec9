"""Training data of the image models: images of large objects, as pixels, labels and prompts."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from transformers import PreTrainedTokenizerBase

from mmspec.reference.scenes import (
    BACKGROUNDS,
    COLOURS,
    IMAGE_TOKENS,
    PATTERNS,
    SHAPES,
    SIZES,
    ImagePrompt,
    Scene,
    object_masks,
    sample_image_prompt,
    sample_scene,
)
from mmspec.reference.training.vlm_data import Movable, image_pixels, patch_labels
from mmspec.reference.training.vlm_mentions import IGNORED
from mmspec.training.data.images import DROPPED

__all__ = [
    "CAPTION_CLASSES",
    "CAPTION_LENGTH",
    "CLASSES",
    "GRID",
    "IMAGE_SIZE",
    "READER_PATCH",
    "ImageBatch",
    "PixelBatch",
    "image_batch",
    "image_scenes",
    "pixel_batch",
]

IMAGE_SIZE = 64
READER_PATCH = 8
STRIDE = 4  # pixels a token
GRID = IMAGE_SIZE // STRIDE
CLASSES = len(COLOURS) * len(SHAPES)
CAPTION_LENGTH = 20  # the longest caption has 15 words
# share of those that fill all slots, as some samplers do; the rest is masked as the prompt was
ALL_SLOTS = 0.5
UNKNOWN_WORD = 0.02
_PROMPT_SEED = 0x1FA9E

ATTRIBUTES = {"size": SIZES, "colour": COLOURS, "pattern": PATTERNS, "shape": SHAPES}
CAPTION_CLASSES = {
    f"{name} {place}": len(values) for place in (1, 2) for name, values in ATTRIBUTES.items()
} | {"background": len(BACKGROUNDS), "count": 2}
"""Number of classes of what a prompt says, for each object from left to right."""


@dataclass
class PixelBatch(Movable):
    """Images `[B, 3, 64, 64]` in [-1, 1], and how much each pixel counts `[B, 1, 64, 64]`."""

    pixels: torch.Tensor
    weights: torch.Tensor


@dataclass
class ImageBatch(Movable):
    """Images with their prompts, and P prompts more that have no image.

    `pixels` are [B, 3, s, s] in [-1, 1], and `tokens` [B, cells] what the image tokenizer makes of them (none
    before it has seen them). `words` [B + P, `CAPTION_LENGTH`] are padded on the left, where `word_mask` is
    0; `dropped` [B + P] marks rows without condition. `caption_labels` [B + P, len(CAPTION_CLASSES)] and
    `place_labels` [B, cells, labels of a patch] are what the auxiliary losses learn, `class_labels` [B]
    numbers below 48.
    """

    pixels: torch.Tensor
    tokens: torch.Tensor
    words: torch.Tensor
    word_mask: torch.Tensor
    dropped: torch.Tensor
    caption_labels: torch.Tensor
    place_labels: torch.Tensor
    class_labels: torch.Tensor


def image_scenes(seeds: np.ndarray, objects: int | None = None) -> list[Scene]:
    """One scene of the profile for image tokens for each seed, with so many objects."""
    return [sample_scene(int(seed), objects=objects, profile=IMAGE_TOKENS) for seed in seeds]


def pixel_batch(seeds: np.ndarray, object_weight: float = 1.0) -> PixelBatch:
    """Images in which pixels on objects count `object_weight` times as much as background."""
    scenes = image_scenes(seeds)
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
    """Images with prompts.

    Args:
        seeds: of the scenes.
        tokenizer: of the prompts.
        dropped: share of the images whose prompts are left out.
        only_prompts: so many scenes at the end give no image, but their prompt.
        objects: of each scene; None for one or two.
        grid: tokens a side, of `STRIDE` pixels each.
    """
    scenes, size = image_scenes(seeds, objects), grid * STRIDE
    with_image = scenes[: len(scenes) - only_prompts]
    generators = [np.random.default_rng([int(seed), _PROMPT_SEED]) for seed in seeds]
    prompts = [sample_image_prompt(scene, rng) for scene, rng in zip(scenes, generators, strict=True)]
    encoded = tokenizer(
        [prompt.text for prompt in prompts],
        padding="max_length",
        max_length=CAPTION_LENGTH,
        padding_side="left",
        add_special_tokens=False,
        return_tensors="pt",
    )
    words, mask = encoded["input_ids"], encoded["attention_mask"]
    draws = torch.from_numpy(np.stack([rng.random(2 + CAPTION_LENGTH) for rng in generators]))
    is_dropped = (draws[:, 0] < dropped) & (torch.arange(len(scenes)) < len(with_image))
    mask = mask.masked_fill((is_dropped & (draws[:, 1] < ALL_SLOTS))[:, None], 1)
    # Words that say nothing of the image may be any word; people use many.
    unknown = (draws[:, 2:] < UNKNOWN_WORD) & (words == tokenizer.convert_tokens_to_ids("\u2581a"))
    words = words.masked_fill(unknown, int(tokenizer.unk_token_id))
    return ImageBatch(
        pixels=image_pixels(with_image, size),
        tokens=torch.empty(len(with_image), 0, dtype=torch.long),
        words=words,
        word_mask=mask,
        dropped=is_dropped,
        caption_labels=torch.tensor([_caption_labels(prompt) for prompt in prompts]),
        place_labels=torch.from_numpy(np.stack([patch_labels(scene, STRIDE, size) for scene in with_image])),
        class_labels=torch.tensor([scene.class_label for scene in with_image]),
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
