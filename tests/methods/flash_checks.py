"""FLASH heads of random weights, and answers to prompts with images."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import torch

from mmspec.core.canvas import Canvas, Stopping
from mmspec.core.decoder import Decoder
from mmspec.core.interfaces import (
    AcceptanceRule,
    Drafter,
    Request,
)
from mmspec.core.loop import speculate
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler
from mmspec.core.statistics import DecodingStats
from mmspec.methods.flash.head import FlashConfig, FlashHead
from mmspec.targets import VisionLanguageTarget
from mmspec.targets.causal import CausalTarget
from mmspec.trees.matching import SampleAndMatch
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, encode, tiny_images, user_message

QUESTION = "what is there ?"
IMAGES = tiny_images()
MESSAGES = {
    "one image": user_message(QUESTION, IMAGES[:1]),
    "two images": user_message("which one is red ?", IMAGES[1:3]),
    "no image": user_message(QUESTION),
    "several turns": [
        *user_message(QUESTION, IMAGES[:1]),
        {"role": "assistant", "content": [{"type": "text", "text": "a red circle"}]},
        *user_message("and there ?", IMAGES[2:3]),
    ],
}


def head_for(target: CausalTarget, seed: int = 3, **settings: Any) -> FlashHead:
    """A head of random weights, in the target's dtype."""
    settings = {"compressor_options": {"tokens": 2}, "block": 4} | settings
    config = FlashConfig.for_target(target.config, target.vocabulary, **settings)
    with torch.random.fork_rng(), torch.no_grad():
        torch.manual_seed(seed)
        head = FlashHead(config).to(target.dtype)
        for name, parameter in head.named_parameters():
            if parameter.dim() > 1 and "compressor" not in name:
                parameter.copy_(torch.randn_like(parameter) * parameter.shape[-1] ** -0.5)
    return head.eval().requires_grad_(False)


@functools.cache
def target_of(family: str, dtype: torch.dtype = torch.float32) -> VisionLanguageTarget:
    model, _ = VISION_LANGUAGE_FAMILIES[family]()
    return VisionLanguageTarget(model.to(dtype))


@functools.cache
def inputs_of(family: str, dtype: torch.dtype = torch.float32) -> dict[str, dict[str, Any]]:
    """The model's inputs for every one of `MESSAGES`."""
    _, processor = VISION_LANGUAGE_FAMILIES[family]()
    made = {case: dict(encode(processor, messages)) for case, messages in MESSAGES.items()}
    return {
        case: {key: value.to(dtype) if value.is_floating_point() else value for key, value in inputs.items()}
        for case, inputs in made.items()
    }


def answer(
    target: CausalTarget,
    drafter: Drafter,
    inputs: Sequence[dict[str, Any]],
    sampler: Sampler,
    new_tokens: int,
    rule: AcceptanceRule | None = None,
    seed: int | Sequence[int] = 5,
) -> Canvas:
    """Run the loop on prompts with images."""
    requests = [Request(each) for each in inputs]
    prompts = [request.prompt_tokens for request in requests]
    canvas = Canvas(prompts, Stopping(new_tokens), DecodingStats(), target.device)
    random = RandomStream.from_seed(seed, len(requests))
    for _ in speculate(target, Decoder(drafter, rule or SampleAndMatch()), sampler, requests, canvas, random):
        pass
    return canvas
