"""Scenes for drafters of vision-language models: a picture, a question about it, and the right reply."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.errors import CheckpointError
from mmspec.scenes import (
    CAPTION_PROMPTS,
    DESCRIPTION_PROMPTS,
    Scene,
    caption,
    describe,
    questions,
    render,
    sample_scene,
)
from mmspec.targets import VisionLanguageTarget
from mmspec.targets.causal import to_device
from mmspec.training.drafter_data import DrafterBatch, Example, Trial
from mmspec.training.vlm_data import training_seeds

__all__ = ["SceneConversations", "open_conversations"]

STAGE = 11
TRIAL_SCENES, TRIAL_TOKENS = 4, 96  # descriptions are longer, so none of these ends
KINDS, SHARES = ("description", "caption", "question"), (0.6, 0.2, 0.2)


class SceneConversations:
    """One picture, one prompt and its reply in each sequence, written by the target's own processor.

    Args:
        target: the model that is drafted for.
        processor: its processor, with a chat template.
        batch_size: sequences a step and process.
        seed: of all scenes.
    """

    def __init__(self, target: VisionLanguageTarget, processor: Any, batch_size: int, seed: int) -> None:
        self.target, self.processor = target, processor
        self.batch_size, self.seed = batch_size, seed

    def batch(self, step: int, process: int) -> DrafterBatch:
        seeds = training_seeds(self.seed, STAGE, step, process, self.batch_size)
        return DrafterBatch(tuple(self.example(int(seed)) for seed in seeds), int(seeds[0]))

    def trial(self) -> Trial:
        prompts = [
            self.prompt(sample_scene(seed), DESCRIPTION_PROMPTS[seed % len(DESCRIPTION_PROMPTS)])
            for seed in range(TRIAL_SCENES)
        ]
        return Trial([Request(prompt) for prompt in prompts], Sampler(), TRIAL_TOKENS)

    def example(self, seed: int) -> Example:
        """The sequence of a scene."""
        scene, rng = sample_scene(seed), np.random.default_rng([seed, STAGE])
        kind = str(rng.choice(KINDS, p=SHARES))
        if kind == "question":
            asked = questions(scene, rng, 1)[0]
            text, reply = asked.text, asked.answer
        elif kind == "caption":
            text, reply = str(rng.choice(CAPTION_PROMPTS)), caption(scene)
        else:
            text, reply = str(rng.choice(DESCRIPTION_PROMPTS)), describe(scene)
        prompt, tokenizer = self.prompt(scene, text), self.processor.tokenizer
        said = [*tokenizer(reply, add_special_tokens=False)["input_ids"], tokenizer.eos_token_id]
        answer = torch.tensor([said], device=self.target.device)
        start = prompt["input_ids"].shape[1]
        types: dict[str, Tensor] = {
            name: torch.cat([prompt[name], torch.zeros_like(answer)], 1)
            for name in ("mm_token_type_ids", "token_type_ids")
            if name in prompt
        }
        return Example({**prompt, **types, "input_ids": torch.cat([prompt["input_ids"], answer], 1)}, start)

    def prompt(self, scene: Scene, text: str) -> dict[str, Tensor]:
        """The target's inputs for a question about a scene."""
        parts = [{"type": "image", "image": Image.fromarray(render(scene))}, {"type": "text", "text": text}]
        inputs = self.processor.apply_chat_template(
            [{"role": "user", "content": parts}],
            tokenize=True,
            add_generation_prompt=True,
            return_dict=True,
            return_tensors="pt",
        )
        return {
            name: value
            for name, value in to_device(inputs, self.target.device).items()
            if name != "attention_mask"  # nothing is padded
        }


def open_conversations(
    folder: Path, device: torch.device, batch_size: int, seed: int
) -> tuple[VisionLanguageTarget, SceneConversations]:
    """A frozen vision-language model, and scenes in its words.

    Raises:
        CheckpointError: the model or its processor cannot be read.
    """
    try:
        model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32)
        processor = AutoProcessor.from_pretrained(folder)
    except (OSError, ValueError) as error:
        raise CheckpointError("target", str(folder), f"a whole model ({error})"[:300]) from error
    model.eval().requires_grad_(False)
    nn.Module.to(model, device)
    target = VisionLanguageTarget(model)
    return target, SceneConversations(target, processor, batch_size, seed)
