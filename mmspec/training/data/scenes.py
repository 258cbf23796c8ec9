"""Training data of new toy-world scenes in every step: conversations about images, and images to draw."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from einops import rearrange
from PIL import Image
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.scenes import (
    CAPTION_PROMPTS,
    DESCRIPTION_PROMPTS,
    HELD_OUT_SEEDS,
    IMAGE_TOKENS,
    ImagePrompt,
    Scene,
    caption,
    describe,
    questions,
    render,
    render_clip,
    sample_clip,
    sample_image_prompt,
    sample_scene,
    training_seeds,
)
from mmspec.training.data.conversations import Conversation, ConversationReader, message
from mmspec.training.data.images import DROPPED, TRIAL_IMAGES, LlamaGenImages
from mmspec.training.data.images import STAGE as IMAGE_STAGE
from mmspec.training.data.sequences import DrafterBatch, DrafterData, Trial

__all__ = [
    "CAPTION_LENGTH",
    "SHARES",
    "PromptedScenes",
    "SceneImages",
    "SceneTalk",
    "image_pixels",
    "scene_data",
    "scene_talk",
]

STAGE = 11
TRIAL_SCENES, TRIAL_TOKENS = 4, 96  # all descriptions are longer, so that no trial ends early
SHARES = {"description": 0.45, "caption": 0.15, "question": 0.1, "two images": 0.15, "clip": 0.15}
FRAMES = 4
CAPTIONED = 0.3  # share of captions among prompts with several images
PIXELS_A_TOKEN = 4
CAPTION_LENGTH = 20  # the longest caption has 15 words
# share of the null prompts that fill all slots, as in some samplers; the others are masked as their prompts
ALL_SLOTS = 0.5
UNKNOWN_WORD = 0.02
_PROMPT_SEED = 0x1FA9E


def scene_data(
    target: Any, reader: ConversationReader | Path, batch_size: int, seed: int, regenerate: int
) -> DrafterData:
    """Make data of new scenes in every step: images for an image model, conversations about them for others.

    Arguments are those of `MakeData`; `train_drafter` takes this function as its `data`.
    """
    if isinstance(reader, Path):
        return SceneImages(target, reader, batch_size, seed)
    if isinstance(reader, ConversationReader):
        return SceneTalk(reader, batch_size, seed, regenerate=regenerate)
    raise TypeError(type(reader).__name__)


def scene_talk(seed: int, kind: str) -> Conversation:
    """Make a conversation of one prompt about a scene, and the right reply.

    With two images or a clip, the reply is about the first image: scenes-llava was never trained on several
    images together, and such replies are nearest to its own. Drafters learn the target's hidden states and
    distributions at each token.

    Args:
        seed: equal seeds give equal conversations.
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
    """Data of conversations about new scenes in every step.

    Args:
        reader: encodes conversations for the target.
        batch_size: sequences per step and process.
        seed: seed of all scenes.
        regenerate: most tokens of a reply to several images that the target generates itself; 0 for the right
            replies. For one image the right replies are those of scenes-llava anyway.
    """

    def __init__(
        self, reader: ConversationReader, batch_size: int, seed: int, *, regenerate: int = 0
    ) -> None:
        self.reader, self.batch_size, self.seed, self.regenerate = reader, batch_size, seed, regenerate

    def batch(self, step: int, process: int) -> DrafterBatch:
        seeds = training_seeds(self.seed, STAGE, step, process, self.batch_size)
        kinds = np.random.default_rng(seeds).choice(list(SHARES), size=len(seeds), p=list(SHARES.values()))
        talks = [scene_talk(int(seed), str(kind)) for seed, kind in zip(seeds, kinds, strict=True)]
        several = [row for row, each in enumerate(talks) if len(each.images) > 1]
        if self.regenerate and several:
            regenerated = self.reader.regenerated([talks[row] for row in several], self.regenerate)
            for row, each in zip(several, regenerated, strict=True):
                talks[row] = each
        return DrafterBatch(tuple(map(self.reader.example, talks)), int(seeds[0]))

    def trial(self) -> Trial:
        talks = [scene_talk(seed, "description").until(1) for seed in range(TRIAL_SCENES)]
        requests = [Request(self.reader.inputs(each, answering=True)) for each in talks]
        return Trial(requests, Sampler(), TRIAL_TOKENS)


class SceneImages(LlamaGenImages):
    """Data of images of new scenes in every step, a tenth of them without prompts."""

    def batch(self, step: int, process: int) -> DrafterBatch:
        seeds = training_seeds(self.seed, IMAGE_STAGE, step, process, self.batch_size)
        prompted = PromptedScenes.of(seeds)
        pixels = image_pixels(prompted.scenes, self.target.grid.rows * PIXELS_A_TOKEN)
        return DrafterBatch(
            self.examples(self.asked(prompted), prompted.dropped.tolist(), pixels), int(seeds[0])
        )

    def prompts(self, step: int, process: int) -> Trial:
        seeds = training_seeds(self.seed, IMAGE_STAGE, step, process, self.batch_size)
        return self.trial_of(self.asked(PromptedScenes.of(seeds, dropped=0.0)))

    def trial(self) -> Trial:
        return self.trial_of(self.asked(PromptedScenes.of(np.arange(TRIAL_IMAGES), dropped=0.0)))

    def asked(self, prompted: PromptedScenes) -> list[Tensor | int]:
        """The prompt of each scene as the target takes it: tokens, or a class label."""
        if self.target.classes is not None:
            return [scene.class_label for scene in prompted.scenes]
        rows = zip(*prompted.words(self.reader.tokenizer), strict=True)
        return [words[mask.bool()] for words, mask in rows]


@dataclass(frozen=True)
class PromptedScenes:
    """Scenes with prompts that describe all or part of them.

    Attributes:
        dropped: bool [n], rows that are shown without their condition.
        draws: random numbers [n, 1 + CAPTION_LENGTH] in [0, 1), see `words`.
    """

    scenes: list[Scene]
    prompts: list[ImagePrompt]
    dropped: Tensor
    draws: Tensor

    @classmethod
    def of(
        cls, seeds: np.ndarray, *, dropped: float = DROPPED, objects: int | None = None, kept: int = 0
    ) -> PromptedScenes:
        """Sample scenes of the profile for image tokens, and a prompt for each.

        Args:
            seeds: seeds of the scenes.
            dropped: share of the scenes that are shown without their prompts.
            objects: number of objects of each scene; None for one or two.
            kept: number of scenes at the end that always have their prompts.
        """
        scenes = [sample_scene(int(seed), objects=objects, profile=IMAGE_TOKENS) for seed in seeds]
        generators = [np.random.default_rng([int(seed), _PROMPT_SEED]) for seed in seeds]
        prompts = [sample_image_prompt(scene, rng) for scene, rng in zip(scenes, generators, strict=True)]
        draws = torch.from_numpy(np.stack([rng.random(2 + CAPTION_LENGTH) for rng in generators]))
        is_dropped = (draws[:, 0] < dropped) & (torch.arange(len(scenes)) < len(scenes) - kept)
        return cls(scenes, prompts, is_dropped, draws[:, 1:])

    def words(self, tokenizer: PreTrainedTokenizerBase) -> tuple[Tensor, Tensor]:
        """Tokens [n, `CAPTION_LENGTH`] of the prompts, padded on the left, and their mask, 0 at padding.

        Half of the dropped rows have no mask. A few words without meaning are replaced by unknown ones.
        """
        encoded = tokenizer(
            [prompt.text for prompt in self.prompts],
            padding="max_length",
            max_length=CAPTION_LENGTH,
            padding_side="left",
            add_special_tokens=False,
            return_tensors="pt",
        )
        words, mask = encoded["input_ids"], encoded["attention_mask"]
        mask = mask.masked_fill((self.dropped & (self.draws[:, 0] < ALL_SLOTS))[:, None], 1)
        # words without meaning for the image may be any word, as in prompts of users
        unknown = (self.draws[:, 1:] < UNKNOWN_WORD) & (words == tokenizer.convert_tokens_to_ids("\u2581a"))
        return words.masked_fill(unknown, int(tokenizer.unk_token_id)), mask


def image_pixels(scenes: Sequence[Scene], size: int) -> Tensor:
    """Images `[B, 3, size, size]` in [-1, 1]."""
    images = np.stack([render(scene, size) for scene in scenes])
    pixels = rearrange(torch.from_numpy(images), "b h w c -> b c h w")
    return pixels.float().div_(127.5).sub_(1).contiguous()
