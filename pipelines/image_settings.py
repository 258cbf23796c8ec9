"""Settings of image generation: keyword arguments in diffusers' words, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Self

import torch

from mmspec.call_fields import (
    SAMPLING,
    ContinuousFields,
    ImageFields,
    RandomFields,
    SamplingFields,
    check_fields,
    known_fields,
)
from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import Sampler, check_rows
from mmspec.errors import InputError
from mmspec.open_types import Keywords
from mmspec.pipelines.image_prompts import ImageTarget
from mmspec.pipelines.settings import GenerationSettings, read_keywords, read_seeds
from mmspec.pipelines.token_processors import shaping_of, truncation_of
from mmspec.plugins import family_of
from mmspec.targets import ImageTokenTarget
from mmspec.validation import given_of, is_list
from mmspec.vectors.denoising_head import DDPMSchedule, FlowSchedule
from mmspec.vectors.sampling import DenoisingSampler

__all__ = ["ContinuousSettings", "ImageBatchSettings", "ImageSettings", "sampling_defaults"]

OF_PROMPTS = ("class_labels", "negative_prompt", "height", "width", "control_strength")
OF_CALLS = {"prompt", *OF_PROMPTS, "control_image", "callback_on_step_end", "return_dict"}
LENGTHS = ("min_length", "min_new_tokens")  # of images they say nothing
STEPS = {"flow": 20, "ddpm": 100}
OWN = (
    "guidance_scale", "guidance_schedule", "temperature", "num_inference_steps", "shift", "clip_sample_range",
)  # fmt: skip


@dataclass(frozen=True)
class ImageBatchSettings(ImageFields, RandomFields):
    """Settings that all pipelines of images share: the fields of `mmspec.call_fields` that its bases hold.

    Rows of random numbers are the images of the first prompt, then those of the second. A list with one seed
    per prompt gives what single calls give; with one per image, image i is the first one of seed i. A list of
    other settings has one for each prompt, which is that of all its images.
    """

    def __post_init__(self) -> None:
        known = known_fields(type(self))  # those of samplers may be lists, which samplers check
        check_fields(self, {name: one for name, one in known.items() if name not in SAMPLING})

    @classmethod
    def from_keywords(cls, target: ImageTarget, keywords: Mapping[str, object]) -> Self:
        """Read settings from a call's keywords, completed by those of a target; see `sampling_defaults`.

        Raises:
            UnknownArgumentError: a keyword that does not exist; the message holds the nearest one.
            InputError: a value that cannot be used.
        """
        return cls(**{**sampling_defaults(target), **read_keywords(cls, keywords, OF_CALLS)})

    def of_images(self, prompts: int) -> Keywords:
        """Sampling settings that are given, where they are lists with one value for each image.

        Raises:
            InputError: a list of another length than the prompts.
        """
        check_rows(self, prompts, "prompts")
        settings: Keywords = {}
        for name in SAMPLING:
            given = getattr(self, name, None)
            if is_list(given):
                given = [value for value in given for _ in range(self.num_images_per_prompt)]
            if given is not None:
                settings[name] = given
        return settings

    def random(self, prompts: int, device: torch.device) -> RandomStream | None:
        """Random streams of all images; None if neither seed nor generator is given.

        Raises:
            InputError: seeds that are no integers, or a list that fits neither prompts nor images.
        """
        copies = self.num_images_per_prompt
        rows = prompts * copies
        seeds = read_seeds(self.seed, self.generator, sorted({prompts, rows}))
        if seeds is None:
            return None
        if not isinstance(seeds, list) or len(seeds) == rows:
            return RandomStream.from_seed(seeds, rows, device)
        if len(seeds) != prompts:
            raise InputError("seed", seeds, f"one integer, one for each of the {prompts} prompts, or {rows}")
        return RandomStream(torch.cat([RandomStream.from_seed(one, copies, device).keys for one in seeds]))


@dataclass(frozen=True)
class ImageSettings(ImageBatchSettings, SamplingFields):
    """Settings of images of discrete tokens. None takes the generation config's, or the published one."""

    def sampler(self, target: ImageTokenTarget, prompts: int = 1) -> Sampler:
        """Sampler of the distribution that is promised, for the images of all prompts.

        Raises:
            InputError: a value outside its range, or a list of another length than the prompts.
        """
        settings = {"temperature": 1.0, **self.of_images(prompts)}
        if target.sampler is not Sampler:
            settings["guidance_schedule"] = self.guidance_schedule
        elif self.guidance_schedule != "constant":
            allowed = "'constant': this model decides its tokens one after another"
            raise InputError("guidance_schedule", self.guidance_schedule, allowed)
        made: Sampler = target.sampler(**settings)
        return made


@dataclass(frozen=True)
class ContinuousSettings(ImageBatchSettings, ContinuousFields):
    """Settings of images of continuous tokens. None takes the model's default, or the published one."""

    def sampler(self, target: Any, prompts: int, length: int, normalize: bool = False) -> DenoisingSampler:
        """Sampler of the distribution that is promised, for the images, of `length` tokens, of all prompts.

        Raises:
            InputError: a value outside its range, or one that this model has no use for.
        """
        kind = target.denoiser.config.kind
        steps = STEPS[kind] if self.num_inference_steps is None else self.num_inference_steps
        if kind == "ddpm" and self.shift is not None:
            raise InputError("shift", self.shift, "nothing: the times of a diffusion head are fixed")
        if kind == "flow" and self.clip_sample_range is not None:
            raise InputError("clip_sample_range", self.clip_sample_range, "nothing: the head is a flow")
        if kind == "flow":
            shift = 1.0 if self.shift is None else self.shift
            schedule: FlowSchedule | DDPMSchedule = FlowSchedule(
                steps, shift, last_step_noise=self.last_step_noise
            )
        else:
            schedule = DDPMSchedule(steps, self.last_step_noise, self.clip_sample_range)
        made: DenoisingSampler = target.sampler(
            source=target.denoiser,
            schedule=schedule,
            guidance_schedule=self.guidance_schedule,
            normalize=normalize if self.normalize_tokens is None else self.normalize_tokens,
            length=length,
            **self.of_images(prompts),
        )
        return made


def sampling_defaults(target: ImageTarget) -> Keywords:
    """Sampling settings of a model that draws: those of its generation config, then the published ones.

    The generation config of a model which also answers is about its answers, and does not count.

    Raises:
        InputError: the generation config of a LlamaGen sets what images are not drawn by.
    """
    stored = getattr(target.model, "generation_config", None)
    if target.vector_size:
        return {**target.published, **given_of(**{name: getattr(stored, name, None) for name in OWN})}
    family = family_of(target.model.config)
    if family is None or family.answers:
        return dict(target.published)
    own = GenerationSettings.from_keywords(stored, {})
    for name, value in (shaping_of(own) | truncation_of(own)).items():
        if name not in LENGTHS:
            allowed = f"None: images are drawn by {', '.join(SAMPLING)}"
            raise InputError(f"generation_config.{name}", value, allowed)
    greedy = {"temperature": 0.0} if own.do_sample is False else {}
    return {**target.published, **given_of(**{name: getattr(own, name) for name in SAMPLING}), **greedy}
