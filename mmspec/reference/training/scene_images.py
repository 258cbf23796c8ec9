"""Scenes for drafters of image models."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from torch import Tensor

from mmspec.reference.training.image_data import ImageBatch, image_batch
from mmspec.reference.training.image_model import build_caption_tokenizer
from mmspec.reference.training.vlm_data import training_seeds
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.training.data.images import STAGE, TRIAL_IMAGES, LlamaGenImages
from mmspec.training.data.sequences import DrafterBatch, Trial

__all__ = ["SceneImages"]


class SceneImages(LlamaGenImages):
    """Data of fresh scenes in every step, a tenth of them without prompts."""

    def __init__(self, target: LlamaGenTarget, folder: Path, batch_size: int, seed: int) -> None:
        super().__init__(target, folder, batch_size, seed)
        self.tokenizer = build_caption_tokenizer()

    def batch(self, step: int, process: int) -> DrafterBatch:
        seeds = training_seeds(self.seed, STAGE, step, process, self.batch_size)
        scenes = image_batch(seeds, self.tokenizer, grid=self.target.grid.rows)
        asked = zip(self.asked(scenes), scenes.dropped.tolist(), strict=True)
        prompts = [self.condition(words, dropped=dropped) for words, dropped in asked]
        return DrafterBatch(self.examples(prompts, scenes.pixels), int(seeds[0]))

    def prompts(self, step: int, process: int) -> Trial:
        seeds = training_seeds(self.seed, STAGE, step, process, self.batch_size)
        return self.trial_of(self.asked(image_batch(seeds, self.tokenizer, dropped=0.0)))

    def trial(self) -> Trial:
        return self.trial_of(self.asked(image_batch(np.arange(TRIAL_IMAGES), self.tokenizer, dropped=0.0)))

    def asked(self, scenes: ImageBatch) -> list[Tensor | int]:
        """The prompt of each scene as the target takes it: words, or a class label."""
        if self.text_encoder is None:
            return [int(label) for label in scenes.class_labels]
        rows = zip(scenes.words, scenes.word_mask, strict=True)
        return [words[mask.bool()] for words, mask in rows]
