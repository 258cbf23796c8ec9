"""Settings of image generation: keyword arguments in diffusers' words, checked."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch

from mmspec.core.random_stream import RandomStream
from mmspec.core.sampling import ROW_SETTINGS, Sampler, check_rows
from mmspec.errors import InputError
from mmspec.pipelines.settings import GenerationSettings, read_keywords, read_seeds
from mmspec.pipelines.token_processors import shaping_of, truncation_of
from mmspec.plugins import family_of
from mmspec.registry import did_you_mean
from mmspec.validation import given_of, is_integer, is_list
from mmspec.vectors.denoising_head import DDPMSchedule, FlowSchedule
from mmspec.vectors.sampling import DenoisingSampler

__all__ = ["ContinuousSettings", "ImageBatchSettings", "ImageSettings", "sampling_defaults"]

OUTPUT_TYPES = ("pil", "pt", "np", "latent")
OF_PROMPTS = ("class_labels", "negative_prompt", "height", "width", "control_strength")
OF_CALLS = {"prompt", *OF_PROMPTS, "control_image", "callback_on_step_end", "return_dict"}
LENGTHS = ("min_length", "min_new_tokens")  # of images they say nothing
ROWS_AT_ONCE = 16
MAX_IMAGES = 10_000
STEPS = {"flow": 20, "ddpm": 100}
OWN = (
    "guidance_scale", "guidance_schedule", "temperature", "num_inference_steps", "shift", "clip_sample_range",
)  # fmt: skip


@dataclass(frozen=True)
class ImageBatchSettings:
    """Settings that all pipelines of images share.

    Args:
        guidance_scale: classifier-free guidance, u + s (c - u); 1 is off, and halves the work of images that
            are decoded together if it is off for all of them.
        temperature: of sampling.
        seed: integer, or a list. Row i of an integer seed has its own stream; rows are the images of the
            first prompt, then those of the second. A list with one seed per prompt gives what single calls
            give; with one per image, image i is the first one of seed i. None draws a seed
            from torch's global generator, as diffusers does.
        generator: torch generator(s), diffusers' way; their initial seeds are taken.
        num_images_per_prompt: images of each prompt.
        batch_size: images decoded together; the images do not depend on it.
        output_type: "pil", "pt", "np", or "latent" for the tokens alone.
    """

    guidance_scale: float | Sequence[float] | None = None
    temperature: float | Sequence[float] | None = None
    seed: int | Sequence[int] | None = None
    generator: torch.Generator | Sequence[torch.Generator] | None = None
    num_images_per_prompt: int = 1
    batch_size: int = ROWS_AT_ONCE
    output_type: str = "pil"

    def __post_init__(self) -> None:
        for name in ("num_images_per_prompt", "batch_size"):
            value = getattr(self, name)
            if not is_integer(value) or not 1 <= value <= MAX_IMAGES:
                raise InputError(name, value, f"an integer from 1 to {MAX_IMAGES:,}")
        if not isinstance(self.output_type, str) or self.output_type not in OUTPUT_TYPES:
            raise InputError("output_type", self.output_type, did_you_mean(self.output_type, OUTPUT_TYPES))

    @classmethod
    def from_keywords(cls, target: Any, keywords: Mapping[str, Any]) -> Self:
        """Read settings from a call's keywords, completed by those of a target; see `sampling_defaults`.

        Raises:
            UnknownArgumentError: a keyword that does not exist; the message holds the nearest one.
            InputError: a value that cannot be used.
        """
        return cls(**{**sampling_defaults(target), **read_keywords(cls, keywords, OF_CALLS)})

    def of_images(self, prompts: int) -> dict[str, Any]:
        """Sampling settings that are given, where they are lists with one value for each image.

        Raises:
            InputError: a list of another length than the prompts.
        """
        check_rows(self, prompts, "prompts")
        settings: dict[str, Any] = {}
        for name in ROW_SETTINGS:
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
class ImageSettings(ImageBatchSettings):
    """Settings of images of discrete tokens; None takes the generation config's default or the published one.

    Those of sampling are one value, or a list with one for each prompt, which is that of all its images.

    Args:
        temperature: 0 takes the likeliest token everywhere.
        top_k, top_p, min_p: truncation, in that order; 0 keeps every token.
        guidance_schedule: "constant"; or "rising" from 1 with the share of the image that is decided, of
            models that decide many cells in a forward, which LPD calls linear.
        others: see `ImageBatchSettings`.
    """

    top_k: int | Sequence[int] | None = None
    top_p: float | Sequence[float] | None = None
    min_p: float | Sequence[float] | None = None
    guidance_schedule: str = "constant"

    def sampler(self, target: Any, prompts: int = 1) -> Sampler:
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
class ContinuousSettings(ImageBatchSettings):
    """Settings of images of continuous tokens. None takes the model's default, or the published one.

    Guidance and temperature are one value, or a list with one for each prompt, which is that of all its
    images.

    Args:
        temperature: factor of the noise of every step of the head, above 0; the first noise is not scaled.
        guidance_schedule: "constant"; "rising" from 1 with the share of the image that is decided, which MAR
            calls linear; "falling" to 1, which NextStep-1 calls linear.
        num_inference_steps: steps of the head for every token; 20 for flows, 100 for diffusions.
        shift: of the times of a flow; above 1 for more steps at early times.
        clip_sample_range: largest number of a token that a diffusion head predicts; None does not clip.
        last_step_noise: whether the last step has noise like the others, which the published samplers leave
            out; without it a token has no density, which exact speculation needs.
        normalize_tokens: whether each token is normalised as it is drawn; None is what the image tokenizer
            asks for.
        others: see `ImageBatchSettings`.
    """

    guidance_schedule: str = "constant"
    num_inference_steps: int | None = None
    shift: float | None = None
    clip_sample_range: float | None = None
    last_step_noise: bool = False
    normalize_tokens: bool | None = None

    def sampler(self, target: Any, prompts: int, length: int, normalize: bool = False) -> DenoisingSampler:
        """Sampler of the distribution that is promised, for the images, of `length` tokens, of all prompts.

        Raises:
            InputError: a value outside its range, or one that this model has no use for.
        """
        kind = target.denoiser.config.kind
        steps = STEPS[kind] if self.num_inference_steps is None else self.num_inference_steps
        if not is_integer(steps):
            raise InputError("num_inference_steps", steps, "an integer of at least 2")
        if not isinstance(self.last_step_noise, bool):
            raise InputError("last_step_noise", self.last_step_noise, "True or False")
        if kind == "ddpm" and self.shift is not None:
            raise InputError("shift", self.shift, "nothing: the times of a diffusion head are fixed")
        if kind == "flow" and self.clip_sample_range is not None:
            raise InputError("clip_sample_range", self.clip_sample_range, "nothing: the head is a flow")
        if kind == "flow":
            shift = 1.0 if self.shift is None else self.shift
            schedule: Any = FlowSchedule(steps, shift, last_step_noise=self.last_step_noise)
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


def sampling_defaults(target: Any) -> dict[str, Any]:
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
            allowed = f"None: images are drawn by {', '.join(ROW_SETTINGS)}"
            raise InputError(f"generation_config.{name}", value, allowed)
    greedy = {"temperature": 0.0} if own.do_sample is False else {}
    return {**target.published, **given_of(**{name: getattr(own, name) for name in ROW_SETTINGS}), **greedy}
