"""Conversations about scenes, for drafters of vision-language models: images, a prompt, and the reply."""

from __future__ import annotations

import numpy as np
from PIL import Image

from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.reference.scenes import (
    CAPTION_PROMPTS,
    DESCRIPTION_PROMPTS,
    HELD_OUT_SEEDS,
    caption,
    describe,
    questions,
    render,
    render_clip,
    sample_clip,
    sample_scene,
)
from mmspec.reference.training.vlm_data import training_seeds
from mmspec.training.data.conversations import Conversation, ConversationReader, message
from mmspec.training.data.sequences import DrafterBatch, Trial

__all__ = ["SHARES", "SceneTalk", "scene_talk"]

STAGE = 11
TRIAL_SCENES, TRIAL_TOKENS = 4, 96  # descriptions are longer, so none of these ends
SHARES = {"description": 0.45, "caption": 0.15, "question": 0.1, "two images": 0.15, "clip": 0.15}
FRAMES = 4
CAPTIONED = 0.3  # of what shows several images


def scene_talk(seed: int, kind: str) -> Conversation:
    """Make a conversation of one prompt about a scene, and the right reply.

    Of two images and of clips the reply is about the first: scenes-llava never saw several together, and
    this is nearest to what it says by itself. What its drafters learn is what it makes of each token.

    Args:
        seed: equal seeds give equal talk.
        kind: a key of `SHARES`.
    """
    rng, scene = np.random.default_rng([seed, STAGE]), sample_scene(seed)
    images, captioned = [render(scene)], kind == "caption"
    if kind == "question":
        asked = questions(scene, rng, 1)[0]
        return talk(images, asked.text, asked.answer)
    if kind in ("two images", "clip"):
        captioned = rng.random() < CAPTIONED
        if kind == "clip":
            clip = sample_clip(seed, frames=FRAMES)
            images = list(render_clip(clip))
        else:
            images.append(render(sample_scene(int(rng.integers(HELD_OUT_SEEDS.stop, 2**62)))))
    prompt = str(rng.choice(CAPTION_PROMPTS if captioned else DESCRIPTION_PROMPTS))
    return talk(images, prompt, caption(scene) if captioned else describe(scene))


def talk(images: list[np.ndarray], prompt: str, reply: str) -> Conversation:
    """Make a conversation of images `[H, W, 3]`, a prompt and a reply."""
    messages = (message("user", prompt, len(images)), message("assistant", reply))
    return Conversation(messages, tuple(map(Image.fromarray, images)))


class SceneTalk:
    """Data of conversations about fresh scenes in every step.

    Args:
        reader: of the target's tokens.
        batch_size: sequences a step and process.
        seed: of all scenes.
        regenerate: longest reply to several images that the target writes itself; 0 for the right ones. Of
            one image, these are what scenes-llava says anyway.
    """

    def __init__(
        self, reader: ConversationReader, batch_size: int, seed: int, *, regenerate: int = 0
    ) -> None:
        self.reader, self.batch_size, self.seed, self.regenerate = reader, batch_size, seed, regenerate

    def batch(self, step: int, process: int) -> DrafterBatch:
        seeds = training_seeds(self.seed, STAGE, step, process, self.batch_size)
        kinds = np.random.default_rng(seeds).choice(list(SHARES), size=len(seeds), p=list(SHARES.values()))
        told = [scene_talk(int(seed), str(kind)) for seed, kind in zip(seeds, kinds, strict=True)]
        several = [row for row, each in enumerate(told) if len(each.images) > 1]
        if self.regenerate and several:
            said = self.reader.regenerated([told[row] for row in several], self.regenerate)
            for row, each in zip(several, said, strict=True):
                told[row] = each
        return DrafterBatch(tuple(map(self.reader.example, told)), int(seeds[0]))

    def trial(self) -> Trial:
        told = [scene_talk(seed, "description").until(1) for seed in range(TRIAL_SCENES)]
        requests = [Request(self.reader.inputs(each, answering=True)) for each in told]
        return Trial(requests, Sampler(), TRIAL_TOKENS)
