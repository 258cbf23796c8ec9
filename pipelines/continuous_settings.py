"""Settings of images of continuous tokens: keyword arguments in diffusers' words, checked."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from transformers import PreTrainedModel

from mmspec.decoding.vector_sampling import DenoisingSampler
from mmspec.errors import InputError
from mmspec.models.denoising import DDPMSchedule, FlowSchedule
from mmspec.pipelines.image_settings import ImageBatchSettings
from mmspec.validation import given_of, is_integer

__all__ = ["ContinuousSettings", "continuous_defaults"]

STEPS = {"flow": 20, "ddpm": 100}
#: Sampling settings of the papers' authors, by `model_type`; MAR's scale is that of mar_large.
PUBLISHED: dict[str, dict[str, Any]] = {
    "nextstep": {"guidance_scale": 7.5},
    "mar": {"guidance_scale": 3.0, "guidance_schedule": "rising"},
}
OWN = (
    *("guidance_scale", "guidance_schedule", "temperature", "num_inference_steps", "shift"),
    "clip_sample_range",
)


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
        """Sampler of the distribution that is promised, for the images of all prompts.

        Args:
            target: the model behind the Target interface.
            prompts: number of prompts.
            length: tokens of an image.
            normalize: what `normalize_tokens` is where it is None.

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
        return DenoisingSampler(
            source=target.denoiser,
            schedule=schedule,
            guidance_schedule=self.guidance_schedule,
            normalize=normalize if self.normalize_tokens is None else self.normalize_tokens,
            length=length,
            **self.of_images(prompts),
        )


def continuous_defaults(model: PreTrainedModel) -> dict[str, Any]:
    """Default sampling settings of a model: those of its folder before those that were published."""
    stored = getattr(model, "generation_config", None)
    return PUBLISHED[model.config.model_type] | given_of(
        **{name: getattr(stored, name, None) for name in OWN}
    )
