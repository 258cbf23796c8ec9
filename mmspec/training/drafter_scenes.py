"""Scenes for drafters of image models: prompts, and what the model's own VQ makes of the pictures."""

from __future__ import annotations

from pathlib import Path
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor, nn
from transformers import T5EncoderModel

from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.errors import CheckpointError
from mmspec.models.llamagen import (
    LlamaGenForCausalLM,
    caption_prompt,
    class_prompt,
    null_caption_prompt,
)
from mmspec.models.llamagen.vq import encode_image
from mmspec.targets.causal import to_device
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.training.drafter_data import DrafterBatch, Example, Trial
from mmspec.training.image_data import ImageBatch, image_batch
from mmspec.training.image_folder import TEXT_ENCODER, VQ, load_vq
from mmspec.training.image_model import build_caption_tokenizer
from mmspec.training.vlm_data import training_seeds

__all__ = ["ScenePictures"]

STAGE = 10
TRIAL_SCENES = 2
M = TypeVar("M", bound=nn.Module)


class ScenePictures:
    """Scenes and their prompts, a tenth of them without, in the tokens of a LlamaGen.

    Args:
        target: draws pictures of 16 x 16 tokens; its config says whether from captions or classes.
        folder: of the model, with its image tokenizer and text encoder, as `mmspec train image` writes it.
        batch_size: pictures a step and process.
        seed: of all scenes.

    Raises:
        CheckpointError: the folder lacks a part.
    """

    def __init__(self, target: LlamaGenTarget, folder: Path, batch_size: int, seed: int) -> None:
        self.target, self.batch_size, self.seed = target, batch_size, seed
        self.model = cast(LlamaGenForCausalLM, target.model)
        self.vq = on_device(load_vq(folder / VQ), target.device)
        self.tokenizer = build_caption_tokenizer()
        self.text_encoder: T5EncoderModel | None = None
        if target.config.condition_type == "caption":
            self.text_encoder = on_device(load_text_encoder(folder / TEXT_ENCODER), target.device)

    def batch(self, step: int, process: int) -> DrafterBatch:
        seeds = training_seeds(self.seed, STAGE, step, process, self.batch_size)
        scenes = image_batch(seeds, self.tokenizer)
        codes = encode_image(self.vq, scenes.pixels.to(self.target.device)).flatten(1)
        examples = []
        for row, tokens in enumerate(codes):
            prompt = self.prompt(scenes, row, dropped=bool(scenes.dropped[row]))
            start = prompt["input_ids"].shape[1]
            ids = torch.cat([prompt["input_ids"], tokens[None]], 1)
            examples.append(Example({**prompt, "input_ids": ids}, start))
        return DrafterBatch(tuple(examples), int(seeds[0]))

    def trial(self) -> Trial:
        scenes = image_batch(np.arange(TRIAL_SCENES), self.tokenizer, dropped=0.0)
        settings = self.model.generation_config
        scale = settings.guidance_scale or 1.0
        requests = [
            Request(
                self.prompt(scenes, row),
                negative_inputs=self.prompt(scenes, row, dropped=True) if scale != 1.0 else None,
                grid=self.target.grid,
            )
            for row in range(TRIAL_SCENES)
        ]
        sampler = Sampler(settings.temperature or 1.0, top_k=settings.top_k, guidance_scale=scale)
        return Trial(requests, sampler, self.target.grid.length)

    @torch.no_grad()
    def prompt(self, scenes: ImageBatch, row: int, *, dropped: bool = False) -> dict[str, Tensor]:
        """The condition of a scene, or none, on the target's device."""
        device = self.target.device
        if self.text_encoder is None:
            label = None if dropped else int(scenes.class_labels[row])
            return to_device(class_prompt(self.model.config, [label]), device)
        words = scenes.words[row][scenes.word_mask[row].bool()][None].to(device)
        if dropped:
            return to_device(null_caption_prompt(self.model, words.shape[1]), device)
        return caption_prompt(self.model.config, self.text_encoder(words).last_hidden_state)


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
