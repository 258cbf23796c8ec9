"""Scores of a vision-language model on held-out scenes. Every answer is either right or wrong.

The scores use plain transformers `generate`, so that any model with the same interface can be scored.
"""

from __future__ import annotations

import re
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from tqdm.auto import tqdm
from transformers import AutoModelForImageTextToText, AutoProcessor

from mmspec.errors import InputError
from mmspec.models.checkpoint import check_source, with_own_tokenizer
from mmspec.scenes import (
    BACKGROUNDS,
    COLOURS,
    HELD_OUT_SEEDS,
    MAX_OBJECTS,
    PATTERNS,
    SHAPES,
    SIZES,
    STORY_PROMPTS,
    Question,
    Scene,
    caption,
    describe,
    questions,
    render,
    sample_scene,
)
from mmspec.scenes.language import PLURALS
from reference.smol_data import captioned
from reference.smol_replies import tell

__all__ = ["FIRST_SEED", "named", "score_vlm"]

FIRST_SEED = 10_000
CAPTION_PROMPT = "describe the picture."
DESCRIPTION_PROMPT = "describe the picture in detail."
QUESTIONS_PER_SCENE = 4
MAX_NEW_TOKENS = {"caption": 64, "question": 12, "description": 320, "pair": 128, "clip": 80, "story": 96}
ATTRIBUTES = ("size", "colour", "pattern", "shape")
_NAME = "a " + " ".join(f"({'|'.join(values)})" for values in (SIZES, COLOURS, PATTERNS, SHAPES))
_CAPTION = re.compile(
    rf"{_NAME}(?: left of {_NAME}){{0,{MAX_OBJECTS - 1}}} on (?P<background>{'|'.join(BACKGROUNDS)})\."
)


def score_vlm(
    model_folder: str | Path,
    scenes: int = 500,
    seed: int = FIRST_SEED,
    *,
    descriptions: bool = True,
    several: bool = False,
    stories: bool = False,
    batch_size: int = 50,
    device: str | torch.device | None = None,
) -> dict[str, Any]:
    """Score the captions, answers and descriptions of a model for held-out scenes, by greedy decoding.

    Args:
        model_folder: a folder that `from_pretrained` loads.
        scenes: number of scenes, with the seeds `seed`, `seed + 1`, ...
        seed: first seed, within `HELD_OUT_SEEDS`.
        descriptions: whether to score descriptions too, which takes most of the time.
        several: whether to score captions of pairs of images and of clips too.
        stories: whether to score stories too, once given the image and once a description in words.
        batch_size: prompts per `generate` call.
        device: the default is a GPU if there is one, else the CPU.

    Returns:
        Shares between 0 and 1:

        - `captions`, `descriptions`, `pairs` and `clips` without an error.
        - `answers` and `answers_by_kind` that are right.
        - `attributes` of all objects, `count` and `background` that the captions name correctly.
        - objects whose colour and shape `stories` and `told_stories` (from descriptions) name.

        Further `scenes`, `questions`, `seed`, `device` and `seconds`.

    Raises:
        InputError: a scene is not held out.
    """
    if scenes < 1 or seed not in HELD_OUT_SEEDS or seed + scenes - 1 not in HELD_OUT_SEEDS:
        rule = f"must keep all scenes within the held-out seeds 0 to {HELD_OUT_SEEDS.stop - 1}"
        raise InputError("seed", (seed, scenes), rule)
    started = time.monotonic()
    device = torch.device(device or ("cuda" if torch.cuda.is_available() else "cpu"))
    reader = _Reader(check_source(model_folder), device, batch_size)
    drawn = [sample_scene(seed + index) for index in range(scenes)]
    captions = reader.read("caption", [([render(scene)], CAPTION_PROMPT) for scene in drawn])
    asked = [(scene, question) for scene in drawn for question in _held_out_questions(scene)]
    answers = reader.read("question", [([render(scene)], question.text) for scene, question in asked])
    kinds = np.array([question.kind for _, question in asked])
    right = np.array([said == question.answer for said, (_, question) in zip(answers, asked, strict=True)])
    scores: dict[str, Any] = {
        "captions": _share([said == caption(scene) for said, scene in zip(captions, drawn, strict=True)]),
        "answers": _share(right),
        "answers_by_kind": {str(kind): _share(right[kinds == kind]) for kind in np.unique(kinds)},
        **_score_parts(captions, drawn),
    }
    if descriptions:
        said = reader.read("description", [([render(scene)], DESCRIPTION_PROMPT) for scene in drawn])
        scores["descriptions"] = _share(
            [one == describe(scene) for one, scene in zip(said, drawn, strict=True)]
        )
    for kind in ("pair", "clip") if several else ():
        turns = [captioned(scene.seed, kind) for scene in drawn]
        said = reader.read(kind, [(turn.images, CAPTION_PROMPT) for turn in turns])
        scores[f"{kind}s"] = _share([one == turn.reply for one, turn in zip(said, turns, strict=True)])
    if stories:
        asks = [STORY_PROMPTS[index % len(STORY_PROMPTS)] for index in range(scenes)]
        both = list(zip(drawn, asks, strict=True))
        said = reader.read("story", [([render(scene)], ask) for scene, ask in both])
        told = reader.read("story", [([], f"{tell('single', scene.seed)} {ask}") for scene, ask in both])
        scores |= {"stories": named(said, drawn), "told_stories": named(told, drawn)}
    return scores | {
        "scenes": scenes,
        "questions": len(asked),
        "seed": seed,
        "device": str(device),
        "seconds": round(time.monotonic() - started, 1),
    }


class _Reader:
    """A loaded model that replies to batches of prompts about scenes."""

    def __init__(self, folder: str | Path, device: torch.device, batch_size: int) -> None:
        self.processor = with_own_tokenizer(AutoProcessor.from_pretrained(folder), str(folder))
        self.processor.tokenizer.padding_side = "left"
        model: Any = AutoModelForImageTextToText.from_pretrained(folder)
        self.model = model.to(device).eval()
        self.batch_size = batch_size

    def read(self, kind: str, tasks: Sequence[tuple[Sequence[np.ndarray], str]]) -> list[str]:
        """Return the text of the model's replies to images and prompts, which are all of one kind."""
        replies: list[str] = []
        with tqdm(total=len(tasks), desc=f"replies: {kind}") as bar:
            for start in range(0, len(tasks), self.batch_size):
                batch = tasks[start : start + self.batch_size]
                replies += self._reply(batch, MAX_NEW_TOKENS[kind])
                bar.update(len(batch))
        return replies

    @torch.inference_mode()
    def _reply(self, batch: Sequence[tuple[Sequence[np.ndarray], str]], new_tokens: int) -> list[str]:
        prompts = []
        for shown, prompt in batch:
            content = [*([{"type": "image"}] * len(shown)), {"type": "text", "text": prompt}]
            message = {"role": "user", "content": content}
            prompts.append(self.processor.apply_chat_template([message], add_generation_prompt=True))
        images = [Image.fromarray(image) for shown, _ in batch for image in shown]
        inputs = self.processor(text=prompts, images=images or None, padding=True, return_tensors="pt")
        inputs = inputs.to(self.model.device, self.model.dtype)
        tokens = self.model.generate(**inputs, do_sample=False, max_new_tokens=new_tokens)
        new = tokens[:, inputs["input_ids"].shape[1] :]
        return [text.strip() for text in self.processor.batch_decode(new, skip_special_tokens=True)]


def _held_out_questions(scene: Scene) -> list[Question]:
    return questions(scene, np.random.default_rng([scene.seed, 0xA5]), QUESTIONS_PER_SCENE)


def _score_parts(captions: list[str], scenes: list[Scene]) -> dict[str, Any]:
    """Score the single facts of captions. All facts of a caption that cannot be parsed count as wrong."""
    counts, backgrounds = [], []
    attributes: dict[str, list[bool]] = {name: [] for name in ATTRIBUTES}
    for text, scene in zip(captions, scenes, strict=True):
        read = _CAPTION.fullmatch(text.strip())
        said = [] if read is None else re.findall(_NAME, text)
        counts.append(len(said) == len(scene.objects))
        backgrounds.append(read is not None and read["background"] == scene.background)
        for index, thing in enumerate(scene.objects):
            for attribute, value in enumerate(thing.attributes):
                matches = index < len(said) and said[index][attribute] == value
                attributes[ATTRIBUTES[attribute]].append(matches)
    return {
        "attributes": {name: _share(found) for name, found in attributes.items()},
        "count": _share(counts),
        "background": _share(backgrounds),
    }


def named(texts: Sequence[str], scenes: Sequence[Scene]) -> float:
    """Return the share of the objects in scenes whose colour and shape the text about their scene names."""
    found = []
    for text, scene in zip(texts, scenes, strict=True):
        words = set(re.findall(r"[a-z]+", text.lower()))
        for thing in scene.objects:
            found.append(thing.colour in words and not words.isdisjoint((thing.shape, PLURALS[thing.shape])))
    return _share(found)


def _share(right: list[bool] | np.ndarray) -> float:
    return round(float(np.mean(right)), 4)
