"""Images as tokens of a LlamaGen, for its drafters; the base of all sources of image data."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.errors import CheckpointError, InputError
from mmspec.models.autoencoders import encode_image
from mmspec.models.image_parts import load_text_encoder, load_vq
from mmspec.models.llamagen import LlamaGenForCausalLM, caption_prompt, class_prompt, null_caption_prompt
from mmspec.targets.causal import to_device
from mmspec.targets.llamagen import LlamaGenTarget
from mmspec.training.data.sequences import TrainingExample, Trial

__all__ = ["DROPPED", "STAGE", "TRIAL_IMAGES", "LlamaGenImages", "open_llamagen"]

STAGE = 10
TRIAL_IMAGES = 2
DROPPED = 0.1  # of the images are shown without their prompts, for guidance
M = TypeVar("M", bound=nn.Module)
Inputs = dict[str, Tensor]


class LlamaGenImages:
    """Base of image data: prompts and images as tokens of a LlamaGen.

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
        self.text_encoder: PreTrainedModel | None = None
        self.tokenizer: Any = None
        if target.config.condition_type == "caption":
            encoder, self.tokenizer = load_text_encoder(str(folder), target.config, dtype=torch.float32)
            encoder.eval().requires_grad_(False)
            self.text_encoder = on_device(encoder, target.device)

    def examples(self, prompts: Sequence[Inputs], pixels: Tensor) -> tuple[TrainingExample, ...]:
        """Training examples of prompts and images [B, 3, H, W] in [-1, 1], tokenised."""
        codes = encode_image(self.vq, pixels.to(self.target.device)).flatten(1)
        examples = []
        for prompt, tokens in zip(prompts, codes, strict=True):
            _, offset = self.target.positions(prompt)  # of the prompt alone: it ends where the image begins
            ids = torch.cat([prompt["input_ids"], tokens[None]], 1)
            positions = torch.arange(ids.shape[1], device=ids.device)[None] + offset
            inputs = {**prompt, "input_ids": ids, "position_ids": positions}
            examples.append(TrainingExample(inputs, prompt["input_ids"].shape[1]))
        return tuple(examples)

    def prompts(self, step: int, process: int) -> Trial:
        """Prompts of a step for images that the target is to draw itself."""
        raise NotImplementedError

    def trial_of(self, held_out: Sequence[Tensor | int]) -> Trial:
        """A trial of whole images from held-out captions or labels, with the model's generation settings."""
        settings = self.model.generation_config
        scale = settings.guidance_scale or 1.0
        requests = []
        for asked in held_out:
            nothing = self.condition(asked, dropped=True) if scale != 1.0 else None
            requests.append(Request(self.condition(asked), negative_inputs=nothing, grid=self.target.grid))
        sampler = Sampler(settings.temperature or 1.0, top_k=settings.top_k, guidance_scale=scale)
        return Trial(requests, sampler, self.target.grid.length)

    @torch.no_grad()
    def condition(self, asked: Tensor | int, *, dropped: bool = False) -> Inputs:
        """Prompt inputs of a caption's words [n] or a class label; or the empty prompt of that length."""
        device = self.target.device
        if isinstance(asked, int):
            return to_device(class_prompt(self.model.config, [None if dropped else asked]), device)
        if dropped:
            return to_device(null_caption_prompt(self.model, len(asked)), device)
        if self.text_encoder is None:
            raise InputError("prompt", "a caption", "a class: the target is conditioned on classes")
        features = self.text_encoder(asked[None].to(device)).last_hidden_state
        return caption_prompt(self.model.config, features)


def open_llamagen(folder: Path, device: torch.device) -> LlamaGenTarget:
    """Load the frozen target of a folder, in single precision, with its image tokenizer.

    Raises:
        CheckpointError: a part is missing or damaged.
    """
    try:
        model = LlamaGenForCausalLM.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError) as error:
        raise CheckpointError("target", str(folder), f"a whole model ({error})"[:300]) from error
    model.eval().requires_grad_(False)
    vq = load_vq(str(folder)).requires_grad_(False)
    return LlamaGenTarget(on_device(model, device), on_device(vq, device))


def on_device(module: M, device: torch.device) -> M:
    """Move a module in place and return it."""
    nn.Module.to(module, device)
    return module
