"""Prompts for training drafters on images that their target draws itself, of any family."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.families.glm_image.target import GlmImageTarget
from mmspec.families.image_parts import load_text_encoder
from mmspec.families.llamagen.target import LlamaGenTarget
from mmspec.pipelines.image_prompts import image_requests
from mmspec.pipelines.image_settings import ImageSettings
from mmspec.targets import CausalTarget, ImageTokenTarget
from mmspec.text_file import json_lines, read_text
from mmspec.training.data.images import PromptedImages
from mmspec.training.data.rows import read_all
from mmspec.training.data.sequences import DrafterData, Trial

__all__ = ["ImagePrompts"]

GLM_IMAGE_SIZE = 1024
FORMS = '{"prompt": text} or {"class": number}'


class ImagePrompts:
    """Prompts of a file as `data` of `train_drafter`, for methods that learn from images of the target.

    Args:
        file: JSONL of `{"prompt": text}`, or of `{"class": number}` for a LlamaGen of classes. Other keys are
            for other methods.
        height, width: of the images, in pixels; None is the size that the model was made for.

    Raises:
        InputError: the file or a line of it cannot be used.
    """

    def __init__(self, file: str | Path, height: int | None = None, width: int | None = None) -> None:
        self.file, self.size = Path(file), {"height": height, "width": width}
        text = read_text(self.file, "data", "a JSONL file of prompts")
        self.rows = read_all(json_lines(text, "data, line {}".format, FORMS), read_row)

    def __call__(
        self, target: CausalTarget, words: Any, batch_size: int, seed: int, regenerate: int
    ) -> DrafterData:
        """Make the data; see `MakeData`."""
        if regenerate:
            raise InputError("regenerate", regenerate, "nothing: the target draws images")
        ask: Callable[[Sequence[str | int]], Trial]
        if isinstance(target, GlmImageTarget):
            ask = partial(glm_image_trial, target, words, self.size)
        elif isinstance(target, LlamaGenTarget):
            ask = partial(image_trial, target, {**llamagen_words(target, words), **self.size})
        elif isinstance(target, ImageTokenTarget):
            ask = partial(image_trial, target, {"tokenizer": words, **self.size})
        else:
            raise InputError("data", str(self.file), "conversations: the target draws no images")
        return PromptedImages(self.rows, ask, batch_size, seed)


def read_row(row: Any, where: str) -> str | int:
    """Read a prompt or a class."""
    asked = None
    if isinstance(row, dict):
        given = [row[key] for key in ("prompt", "class") if row.get(key) is not None]
        asked = given[0] if len(given) == 1 else None
    if not isinstance(asked, str | int) or isinstance(asked, bool):
        raise InputError(where, row, FORMS)
    return asked


def llamagen_words(target: LlamaGenTarget, folder: Path) -> dict[str, Any]:
    """Load what reads the captions of a LlamaGen; nothing for one of classes."""
    if target.config.condition_type == "class":
        return {}
    encoder, tokenizer = load_text_encoder(str(folder), target.config, dtype=torch.float32)
    nn.Module.to(encoder.eval().requires_grad_(False), target.device)
    return {"tokenizer": tokenizer, "text_encoder": encoder}


def image_trial(target: ImageTokenTarget, what: dict[str, Any], asked: Sequence[str | int]) -> Trial:
    """Requests of images, of prompts or classes, as `ImagePipeline` makes and samples them."""
    sampler = ImageSettings.from_keywords(target, {}).sampler(target)
    of_classes = isinstance(target, LlamaGenTarget) and target.config.condition_type == "class"
    named: dict[str, Any] = {"class_labels" if of_classes else "prompt": list(asked)}
    requests = image_requests(target, **named, **what, guided=sampler.is_guided)
    return Trial(requests, sampler, max(each.layout.length for each in requests if each.layout))


def glm_image_trial(
    target: GlmImageTarget, processor: Any, size: dict[str, int | None], asked: Sequence[str | int]
) -> Trial:
    """Requests of images without a source image, as diffusers' `GlmImagePipeline` makes and samples them."""
    height, width = (each or GLM_IMAGE_SIZE for each in size.values())
    requests = []
    for text in asked:
        messages = [{"role": "user", "content": [{"type": "text", "text": str(text)}]}]
        inputs = processor.apply_chat_template(
            [messages], tokenize=True, target_h=height, target_w=width, return_dict=True, return_tensors="pt"
        )
        requests.append(Request(dict(inputs)))
    config: Any = target.model.generation_config
    sampler = Sampler(config.temperature or 1.0, top_k=config.top_k, top_p=config.top_p)
    tokens = target.layout_for(requests[0].inputs).length  # of preview and image; a mark ends them
    return Trial(requests, sampler, tokens + 1)
