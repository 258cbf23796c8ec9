"""Scenes for drafters of image models: prompts, and what the model's own VQ makes of the images."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import T5EncoderModel

from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from mmspec.models.llamagen import (
    LlamaGenForCausalLM,
    caption_prompt,
    class_prompt,
    null_caption_prompt,
)
from mmspec.models.llamagen.vq import encode_image
from mmspec.reference.training.image_data import ImageBatch, image_batch
from mmspec.reference.training.image_folder import TEXT_ENCODER, VQ, load_vq
from mmspec.reference.training.image_model import build_caption_tokenizer
from mmspec.reference.training.vlm_data import training_seeds
from mmspec.targets.causal import to_device
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.training.data.sequences import DrafterBatch, Example, Trial

__all__ = ["LlamaGenImages", "SceneImages", "open_llamagen"]

STAGE = 10
TRIAL_IMAGES = 2
M = TypeVar("M", bound=nn.Module)
Inputs = dict[str, Tensor]


class LlamaGenImages:
    """Prompts and images in the tokens of a LlamaGen; what sources of both have in common.

    Args:
        target: with its image tokenizer; its config says whether it draws from captions or classes.
        folder: of the model, with its text encoder in a subfolder.
        batch_size: images a step and process.
        seed: of what is drawn for each step.

    Raises:
        CheckpointError: the folder lacks a part.
    """

    def __init__(self, target: LlamaGenTarget, folder: Path, batch_size: int, seed: int) -> None:
        self.target, self.batch_size, self.seed = target, batch_size, seed
        self.model = cast(LlamaGenForCausalLM, target.model)
        self.vq = target.vq
        self.text_encoder: T5EncoderModel | None = None
        if target.config.condition_type == "caption":
            self.text_encoder = on_device(load_text_encoder(folder / TEXT_ENCODER), target.device)

    def examples(self, prompts: Sequence[Inputs], pixels: Tensor) -> tuple[Example, ...]:
        """Prompts with what the tokenizer makes of the images [B, 3, H, W] in [-1, 1]."""
        codes = encode_image(self.vq, pixels.to(self.target.device)).flatten(1)
        examples = []
        for prompt, tokens in zip(prompts, codes, strict=True):
            _, offset = self.target.positions(prompt)  # of the prompt alone: it ends where the image begins
            ids = torch.cat([prompt["input_ids"], tokens[None]], 1)
            positions = torch.arange(ids.shape[1], device=ids.device)[None] + offset
            inputs = {**prompt, "input_ids": ids, "position_ids": positions}
            examples.append(Example(inputs, prompt["input_ids"].shape[1]))
        return tuple(examples)

    def trial_of(self, prompts: Sequence[Inputs], nothing: Sequence[Inputs]) -> Trial:
        """Whole images of held-out prompts, drawn as the model's generation settings say."""
        settings = self.model.generation_config
        scale = settings.guidance_scale or 1.0
        requests = [
            Request(prompt, negative_inputs=none if scale != 1.0 else None, grid=self.target.grid)
            for prompt, none in zip(prompts, nothing, strict=True)
        ]
        sampler = Sampler(settings.temperature or 1.0, top_k=settings.top_k, guidance_scale=scale)
        return Trial(requests, sampler, self.target.grid.length)

    @torch.no_grad()
    def condition(self, asked: Tensor | int, *, dropped: bool = False) -> Inputs:
        """The prompt of words [n] of a caption or of a class label; or of nothing, as long."""
        device = self.target.device
        if isinstance(asked, int):
            return to_device(class_prompt(self.model.config, [None if dropped else asked]), device)
        if dropped:
            return to_device(null_caption_prompt(self.model, len(asked)), device)
        if self.text_encoder is None:
            raise InputError("prompt", "a caption", "a class: the target is conditioned on classes")
        features = self.text_encoder(asked[None].to(device)).last_hidden_state
        return caption_prompt(self.model.config, features)


class SceneImages(LlamaGenImages):
    """Fresh scenes in every step, a tenth of them without their prompts; images of 16 x 16 tokens."""

    def __init__(self, target: LlamaGenTarget, folder: Path, batch_size: int, seed: int) -> None:
        super().__init__(target, folder, batch_size, seed)
        self.tokenizer = build_caption_tokenizer()

    def batch(self, step: int, process: int) -> DrafterBatch:
        seeds = training_seeds(self.seed, STAGE, step, process, self.batch_size)
        scenes = image_batch(seeds, self.tokenizer)
        asked = zip(self.asked(scenes), scenes.dropped.tolist(), strict=True)
        prompts = [self.condition(words, dropped=dropped) for words, dropped in asked]
        return DrafterBatch(self.examples(prompts, scenes.pixels), int(seeds[0]))

    def trial(self) -> Trial:
        asked = self.asked(image_batch(np.arange(TRIAL_IMAGES), self.tokenizer, dropped=0.0))
        return self.trial_of(
            [self.condition(words) for words in asked],
            [self.condition(words, dropped=True) for words in asked],
        )

    def asked(self, scenes: ImageBatch) -> list[Tensor | int]:
        """What each scene is asked for by, in the target's way: words, or a label."""
        if self.text_encoder is None:
            return [int(label) for label in scenes.class_labels]
        rows = zip(scenes.words, scenes.word_mask, strict=True)
        return [words[mask.bool()] for words, mask in rows]


def open_llamagen(folder: Path, device: torch.device) -> LlamaGenTarget:
    """The frozen target of a folder, in single precision, with its image tokenizer.

    Raises:
        CheckpointError: a part is missing or damaged.
    """
    try:
        model = LlamaGenForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError("target", str(folder), f"a whole model ({error})"[:300]) from error
    model.eval().requires_grad_(False)
    return LlamaGenTarget(on_device(model, device), on_device(load_vq(folder / VQ), device))


def load_text_encoder(folder: Path) -> T5EncoderModel:
    """A text encoder in single precision, frozen.

    Raises:
        CheckpointError: there is none in the folder.
    """
    try:
        encoder = T5EncoderModel.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError("target", str(folder), "a text encoder in that folder") from error
    encoder.eval().requires_grad_(False)
    return encoder


def on_device(module: M, device: torch.device) -> M:
    """The module, moved in place."""
    nn.Module.to(module, device)
    return module
