"""Settings of image generation: keyword arguments with diffusers' names, checked."""

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
LENGTHS = ("min_length", "min_new_tokens")  # without effect on images
STEPS = {"flow": 20, "ddpm": 100}
OWN = (
    "guidance_scale", "guidance_schedule", "temperature", "num_inference_steps", "shift", "clip_sample_range",
)  # fmt: skip


@dataclass(frozen=True)
class ImageBatchSettings(ImageFields, RandomFields):
    """Generation settings that all image pipelines share; `mmspec.call_fields` documents the fields.

    Images are ordered by prompt. With a list of one seed per prompt, the images equal those of single calls;
    with one seed per image, image i is the first image of seed i. A list of another setting has one value for
    each prompt, which applies to all its images.
    """

    def __post_init__(self) -> None:
        known = known_fields(type(self))  # the samplers check their own fields, which may be lists
        check_fields(self, {name: one for name, one in known.items() if name not in SAMPLING})

    @classmethod
    def from_keywords(cls, target: ImageTarget, keywords: Mapping[str, object]) -> Self:
        """Read settings from the keywords of a call, with the defaults of a target (`sampling_defaults`).

        Raises:
            UnknownArgumentError: a keyword does not exist; the message names the nearest one.
            InputError: a value is invalid.
        """
        return cls(**{**sampling_defaults(target), **read_keywords(cls, keywords, OF_CALLS)})

    def of_images(self, prompts: int) -> Keywords:
        """Return the sampling settings that are not None; lists are expanded to one value for each image.

        Raises:
            InputError: a list does not have one value for each prompt.
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
        """Return the random streams of all images; None if neither seed nor generator is given.

        Raises:
            InputError: a seed is not an integer, or a list has neither one seed per prompt nor per image.
        """
        copies = self.num_images_per_prompt
        rows = prompts * copies
        seeds = read_seeds(self.seed, self.generator, sorted({prompts, rows}))
        if seeds is None:
            return None
        if not isinstance(seeds, list) or len(seeds) == rows:
            return RandomStream.from_seed(seeds, rows, device)
        if len(seeds) != prompts:
            rule = f"must be an integer, or a list of {prompts} (one per prompt) or {rows} (one per image)"
            raise InputError("seed", seeds, rule)
        return RandomStream(torch.cat([RandomStream.from_seed(one, copies, device).keys for one in seeds]))


@dataclass(frozen=True)
class ImageSettings(ImageBatchSettings, SamplingFields):
    """Generation settings for discrete image tokens.

    None is the value of the model's generation config, or else the published one.
    """

    def sampler(self, target: ImageTokenTarget, prompts: int = 1) -> Sampler:
        """Return the sampler for the images of all prompts.

        Raises:
            InputError: a value is out of range, or a list does not have one value for each prompt.
        """
        settings = {"temperature": 1.0, **self.of_images(prompts)}
        if target.sampler is not Sampler:
            settings["guidance_schedule"] = self.guidance_schedule
        elif self.guidance_schedule != "constant":
            rule = "must be 'constant'; this model decides one token after another"
            raise InputError("guidance_schedule", self.guidance_schedule, rule)
        made: Sampler = target.sampler(**settings)
        return made


@dataclass(frozen=True)
class ContinuousSettings(ImageBatchSettings, ContinuousFields):
    """Generation settings for continuous image tokens.

    None is the default of the model, or else the published one.
    """

    def sampler(self, target: Any, prompts: int, length: int, normalize: bool = False) -> DenoisingSampler:
        """Return the sampler for the images, of `length` tokens each, of all prompts.

        Raises:
            InputError: a value is out of range or has no effect for this model.
        """
        kind = target.denoiser.config.kind
        steps = STEPS[kind] if self.num_inference_steps is None else self.num_inference_steps
        if kind == "ddpm" and self.shift is not None:
            raise InputError("shift", self.shift, "must be None; the times of a diffusion head are fixed")
        if kind == "flow" and self.clip_sample_range is not None:
            raise InputError("clip_sample_range", self.clip_sample_range, "must be None for a flow head")
        if kind == "flow":
            shift = 1.0 if self.shift is None else self.shift
            schedule: FlowSchedule | DDPMSchedule = FlowSchedule(
                steps, shift, last_step_noise=self.last_step_noise
            )
        else:
            schedule = DDPMSchedule(
                steps, last_step_noise=self.last_step_noise, clip_sample_range=self.clip_sample_range
            )
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
    """Return the default sampling settings of an image model: its generation config, then published values.

    The generation config of a model that also generates text applies to text and is ignored.

    Raises:
        InputError: the generation config of a LlamaGen sets a field that is not supported for images.
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
            rule = f"must be None; image generation supports {', '.join(SAMPLING)}"
            raise InputError(f"generation_config.{name}", value, rule)
    greedy = {"temperature": 0.0} if own.do_sample is False else {}
    return {**target.published, **given_of(**{name: getattr(own, name) for name in SAMPLING}), **greedy}
