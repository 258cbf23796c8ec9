"""Examples for checks and timings: generated scenes, or the user's own images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mmspec.errors import InputError
from mmspec.registry import did_you_mean, require_known
from mmspec.scenes import (
    CAPTION_PROMPTS,
    DESCRIPTION_PROMPTS,
    HELD_OUT_SEEDS,
    IMAGE_TOKENS,
    STORY_PROMPTS,
    caption,
    questions,
    render,
    render_clip,
    sample_clip,
    sample_scene,
)

__all__ = [
    "TASKS",
    "Example",
    "held_out_captions",
    "later_turns",
    "own_examples",
    "read_tasks",
    "scene_examples",
]

OF_GRAMMAR = ("caption", "describe", "question", "two_images", "clip")  # all reference models learn these
TASKS = (*OF_GRAMMAR, "story", "mixed")
FIRST_SEED = 20_000  # held out, and disjoint from the scenes that `mmspec evaluate` scores
FIRST_IMAGE_SEED = 500_000  # held-out captions that image models draw
OTHER_SEEDS = 1_000_003  # added to seeds for a second sample of the same distribution
FRAMES = 4
PROMPTS = {"caption": CAPTION_PROMPTS, "story": STORY_PROMPTS}  # others use DESCRIPTION_PROMPTS


@dataclass(frozen=True)
class Example:
    """One conversation: its user turns, and the images of the first one; or a recording to transcribe.

    Attributes:
        turns: one string per user turn; the model's answers are inserted between them. () for a recording.
        images: images in any form that a pipeline accepts.
        category: the group of examples for which the report has a row.
        identifier: name of the example in messages.
        label: the class to draw, for class-conditional models.
        audio: the recording, an input of `load_audio`; None for a conversation.
        transcript: the words of the recording, if they are known.
    """

    turns: tuple[str, ...]
    images: tuple[Any, ...] = ()
    category: str = ""
    identifier: str = ""
    label: int | None = None
    audio: Any = None
    transcript: str | None = None

    def only_turn(self) -> str:
        """The single turn of an example of image generation.

        Raises:
            InputError: the example has several turns.
        """
        if len(self.turns) != 1:
            rule = "must have one turn for image generation"
            raise InputError(self.identifier or "prompt", f"{len(self.turns)} turns", rule)
        return self.turns[0]


def later_turns(examples: Sequence[Example]) -> int:
    """Number of turns that follow the first ones."""
    return sum(len(example.turns) - 1 for example in examples)


def scene_examples(task: str, count: int, seed: int = 0) -> list[Example]:
    """Examples of held-out scenes for the reference models; equal arguments give equal examples.

    Args:
        task: "caption" (one sentence), "describe" (over 100 tokens), "question" (a word or two), "two_images"
            (a description of two scenes), "clip" (of four frames as four images), "story" (free text; only
            scenes-smol was trained on it) or "mixed" (the first three in turn). scenes-llava was trained on
            single images: its texts about several images are fluent and often wrong, and serve for timing.
        count: number of examples.
        seed: selects the scenes.

    Raises:
        InputError: an unknown task, or a number of examples out of range.
    """
    require_known("task", task, TASKS)
    _check_held_out(count, seed, FIRST_SEED)
    kinds = ("caption", "describe", "question") if task == "mixed" else (task,)
    return [
        _scene_example(kinds[index % len(kinds)], FIRST_SEED + seed + index, index) for index in range(count)
    ]


def _check_held_out(count: int, seed: int, first: int) -> None:
    largest = (HELD_OUT_SEEDS.stop - first) // 2
    if not 1 <= count <= largest or not 0 <= seed <= largest:
        raise InputError("samples", (count, seed), f"must be 1 to {largest}, with a seed from 0 to {largest}")


def read_tasks(text: str, *others: str) -> tuple[str, ...]:
    """Parse comma-separated tasks; "all" selects `OF_GRAMMAR`. Error messages list `others` too.

    Raises:
        InputError: an unknown task.
    """
    if text == "all":
        return OF_GRAMMAR
    asked = tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    for task in asked:
        if task not in TASKS:
            raise InputError("task", task, did_you_mean(task, (*TASKS, "all", *others)))
    return asked


def _scene_example(task: str, seed: int, index: int) -> Example:
    name = f"scene {seed}"
    if task == "clip":
        frames = tuple(Image.fromarray(frame) for frame in render_clip(sample_clip(seed, frames=FRAMES)))
        return Example((DESCRIPTION_PROMPTS[0],), frames, category=task, identifier=name)
    scenes = [sample_scene(seed)]
    if task == "two_images":  # the second scene is from the other end of the held-out range
        scenes.append(sample_scene(HELD_OUT_SEEDS.stop - 1 - (seed - FIRST_SEED)))
    if task == "question":
        prompt = questions(scenes[0], np.random.default_rng([seed, 0xBE]), 1)[0].text
    else:
        prompts = PROMPTS.get(task, DESCRIPTION_PROMPTS)
        prompt = prompts[index % len(prompts)]
    images = tuple(Image.fromarray(render(scene)) for scene in scenes)
    return Example((prompt,), images, category=task, identifier=name)


def own_examples(prompts: Sequence[str], images: Sequence[str]) -> list[Example]:
    """Pair the user's prompts and images one to one; a single prompt or image is used for all.

    Raises:
        InputError: the numbers of prompts and images do not match.
    """
    asked = list(prompts) or [CAPTION_PROMPTS[0]]
    if not images:
        return [Example((prompt,), identifier=prompt) for prompt in asked]
    shown = list(images)
    if len(asked) == 1:
        asked *= len(shown)
    elif len(shown) == 1:
        shown *= len(asked)
    if len(asked) != len(shown):
        got = f"{len(asked)} prompts for {len(shown)} images"
        raise InputError("prompt", got, "must be given once, or once for each image")
    return [
        Example((prompt,), (image,), identifier=image) for prompt, image in zip(asked, shown, strict=True)
    ]


def held_out_captions(count: int, seed: int = 0) -> list[str]:
    """Captions of scenes that are not in the training data; equal arguments give equal captions.

    Raises:
        InputError: `count` exceeds the number of captions.
    """
    _check_held_out(count, seed, FIRST_IMAGE_SEED)
    start = FIRST_IMAGE_SEED + seed
    return [caption(sample_scene(start + index, profile=IMAGE_TOKENS)) for index in range(count)]
