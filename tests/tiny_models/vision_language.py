"""Tiny vision-language models of nine families with their real processors, as (model, processor).

    model, processor = VISION_LANGUAGE_FAMILIES["qwen2_5_vl"]()
    inputs = processor.apply_chat_template(
        user_message("what is there ?", images=[tiny_image()]),
        tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt",
    )
    tokens = model.generate(**inputs, do_sample=False, max_new_tokens=64)

Seeded, float32, vocabulary 128, in a few hundredths of a second, no network. The logits of the special tokens
and of the unused rows are 0, so greedy outputs are words alone, of exactly `max_new_tokens` tokens. The
default seeds are those of 24 whose outputs vary most and have no near-ties.

What holds for all, in transformers 5.17 and 5.23 (weights, inputs and greedy tokens are the same in both):
- Batches need `padding=True`, on the left (`encode` does it); rows then equal their batch-1 runs.
- Without an image or clip the media keys are absent, not None.
- `save_pretrained` and the auto classes restore model and processor exactly.
- SmolVLM cannot take an image and a clip in one prompt (both are `pixel_values`, one overwrites the other).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image
from transformers import ProcessorMixin

from .common import Family
from .idefics import tiny_idefics3, tiny_smolvlm
from .llava import tiny_llava, tiny_llava_next, tiny_llava_onevision, tiny_video_llava
from .qwen_vl import tiny_qwen2_5_vl, tiny_qwen2_vl, tiny_qwen3_vl

__all__ = ["HAS_VIDEO", "VISION_LANGUAGE_FAMILIES", "encode", "save_family", "user_message"]

#: Every family by its transformers name; each call builds a fresh pair.
VISION_LANGUAGE_FAMILIES: dict[str, Callable[[], Family]] = {
    "llava": tiny_llava,
    "llava_next": tiny_llava_next,
    "llava_onevision": tiny_llava_onevision,
    "qwen2_vl": tiny_qwen2_vl,
    "qwen2_5_vl": tiny_qwen2_5_vl,
    "qwen3_vl": tiny_qwen3_vl,
    "smolvlm": tiny_smolvlm,
    "idefics3": tiny_idefics3,
    "video_llava": tiny_video_llava,
}

#: The families that take clips.
HAS_VIDEO = {"llava_onevision", "qwen2_vl", "qwen2_5_vl", "qwen3_vl", "smolvlm", "video_llava"}


def user_message(
    text: str, images: Sequence[Image.Image] = (), videos: Sequence[np.ndarray] = ()
) -> list[dict[str, Any]]:
    """One user turn as chat messages: images, then clips, then the text."""
    parts: list[dict[str, Any]] = [{"type": "image", "image": image} for image in images]
    parts += [{"type": "video", "video": video} for video in videos]
    return [{"role": "user", "content": [*parts, {"type": "text", "text": text}]}]


def encode(processor: ProcessorMixin, *messages: list[dict[str, Any]]) -> Any:
    """The model inputs of one or several conversations (padded on the left), as tensors."""
    padding = {"processor_kwargs": {"padding": True}} if len(messages) > 1 else {}
    return processor.apply_chat_template(
        list(messages) if len(messages) > 1 else messages[0],
        tokenize=True,
        add_generation_prompt=True,
        return_dict=True,
        return_tensors="pt",
        **padding,
    )


def save_family(name: str, folder: str | Path) -> Path:
    """Write model and processor of a family as an ordinary checkpoint folder; return it."""
    model, processor = VISION_LANGUAGE_FAMILIES[name]()
    model.save_pretrained(folder)
    processor.save_pretrained(folder)
    return Path(folder)
