"""What `bench` and `check` work on: a loaded model and what it is asked, be it for words or for images."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from mmspec.cli.choice import AcceleratorChoice
from mmspec.cli.loading import (
    given_examples,
    load_any_pipeline,
    load_image_pipeline,
    takes_images,
)
from mmspec.errors import InputError
from mmspec.registry import did_you_mean

if TYPE_CHECKING:
    from mmspec.evaluation.examples import Example
    from mmspec.pipelines import ImagePipeline

__all__ = ["Question", "Subject", "load_subject"]


@dataclass(frozen=True)
class Question:
    """What the command line asks of a model; None where it says nothing.

    Attributes:
        task: of the scenes; "generate" asks for images.
        prompts, images, jsonl, samples, seed: as the options of that name.
        settings: keywords of every call.
    """

    task: str | None
    prompts: Sequence[str] | None
    images: Sequence[str] | None
    jsonl: str | None
    samples: int
    seed: int
    settings: dict[str, Any]

    @property
    def given(self) -> dict[str, Any]:
        """The settings that the command line names."""
        return {name: value for name, value in self.settings.items() if value is not None}

    @property
    def name(self) -> str | None:
        """What reports call it."""
        own = "own prompts" if self.prompts or self.images else self.jsonl
        return own or self.task


@dataclass(frozen=True)
class Subject:
    """A loaded model, and what it is asked.

    Attributes:
        pipe: the pipeline.
        draws: whether it gives images.
        examples: what it is asked.
        settings: keywords of every call.
        described: what they come to, for records.
    """

    pipe: Any
    draws: bool
    examples: list[Example]
    settings: dict[str, Any]
    described: dict[str, Any]

    def contender(self, choice: AcceleratorChoice) -> Any:
        """The pipeline with an accelerator, set up here and only here: a Contender, or Painter for one."""
        from mmspec.evaluation.image_contender import painter
        from mmspec.evaluation.text_contender import contender

        set_up = painter if self.draws else contender
        return set_up(self.pipe, choice.name, **choice.options)


def load_subject(
    source: str, asked: Question, defaults: dict[str, Any], *, dtype: str, device: str | None
) -> Subject:
    """Load a model and bring together what it is asked.

    Args:
        source: folder or hub id.
        asked: by the command line.
        defaults: for words: `task` and settings.
        dtype, device: of the model.

    Raises:
        InputError: something is asked for that this model does not give.
    """
    from mmspec.evaluation.examples import TASKS, scene_examples
    from mmspec.evaluation.image_contender import GENERATE
    from mmspec.evaluation.text_contender import load_images
    from mmspec.pipelines import ImagePipeline

    if asked.task not in (None, GENERATE, *TASKS):
        raise InputError("task", asked.task, did_you_mean(asked.task, (*TASKS, GENERATE)))
    # a file that cannot be used should not cost a load
    examples = given_examples(asked.prompts, asked.images, asked.jsonl, asked.samples)
    if asked.task == GENERATE:
        return image_subject(load_image_pipeline(source, dtype=dtype, device=device), asked, examples)
    pipe = load_any_pipeline(source, dtype=dtype, device=device)
    if isinstance(pipe, ImagePipeline):
        if asked.task is not None:
            raise InputError("task", asked.task, f"{GENERATE}: this model draws images")
        pipe.set_progress_bar_config(disable=True)
        return image_subject(pipe, asked, examples)
    settings = {name: value for name, value in defaults.items() if name != "task"} | asked.given
    if not examples:
        examples = scene_examples(asked.task or defaults["task"], asked.samples, asked.seed)
        if not takes_images(pipe):
            examples = [replace(example, images=()) for example in examples]
    described = {"task": asked.name or defaults["task"], **settings}
    return Subject(pipe, False, load_images(examples), settings, described)


def image_subject(pipe: ImagePipeline, asked: Question, examples: list[Example]) -> Subject:
    """A model that draws, with captions, classes, or prompts of one's own.

    Args:
        pipe: the model.
        asked: by the command line.
        examples: the user's own; [] takes captions or classes.

    Raises:
        InputError: images to look at, or a number of tokens, which the size of the image says.
    """
    from mmspec.evaluation.image_contender import GENERATE, image_examples
    from mmspec.pipelines.image_settings import ImageSettings, sampling_defaults

    if asked.images:
        raise InputError("--image", list(asked.images), "no images: this model draws them")
    if "max_new_tokens" in asked.given:
        raise InputError(
            "--max-new-tokens",
            asked.given["max_new_tokens"],
            f"nothing: an image of this model has {pipe.target.grid.length} tokens",
        )
    examples = examples or image_examples(pipe, asked.samples, asked.seed)
    sampler = ImageSettings.from_keywords(sampling_defaults(pipe.model), asked.given).sampler()
    warpers = ("guidance_scale", "temperature", "top_k", "top_p", "min_p")
    described = {"task": asked.name or GENERATE} | {name: getattr(sampler, name) for name in warpers}
    attention = pipe.model.config._attn_implementation
    described["baseline"] = f"plain decoding through the same loop, {attention} attention"
    return Subject(pipe, True, examples, asked.given, described)
