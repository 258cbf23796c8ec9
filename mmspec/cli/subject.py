"""The subject of `bench`, `check` and `tune`: a loaded model and its prompts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.call_fields import CALL_FIELDS
from mmspec.cli.loading import (
    REFERENCE,
    REFERENCE_IMAGE,
    AcceleratorChoice,
    announce,
    load_pipeline,
    reference_model,
)
from mmspec.cli.options import (
    BatchSize,
    GuidanceScale,
    HeadSteps,
    LastStepNoise,
    Model,
    ModelOptions,
    setting,
)
from mmspec.errors import InputError
from mmspec.open_types import Json, Keywords
from mmspec.validation import given_of

if TYPE_CHECKING:
    from mmspec.evaluation.contenders import Contender
    from mmspec.evaluation.examples import Example
    from mmspec.pipelines import ImageGenerationPipeline, SpeechPipeline

__all__ = ["Question", "Subject", "load_subject"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options for the model and its prompts; None means the default of the command or the model."""

    model: Model = None
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="Prompt; repeatable.")] = None
    images: Annotated[list[str] | None, typer.Option("--image", help="Image (path or URL); repeatable.")] = (
        None
    )
    prompt_file: Annotated[
        str | None,
        typer.Option(
            help="Prompts in a known format: Spec-Bench, MMSpec, COCO captions, Parti, GenEval, DrawBench; "
            "or JSON, a table, or text with one prompt per line. For speech models, JSONL with audio (path) "
            "and text (its words)."
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="Without your own prompts, a task on scenes: caption, describe, question, two_images, clip, "
            "story, several separated by commas, all, or mixed; or generate, for image generators."
        ),
    ] = None
    samples: Annotated[int, typer.Option(min=1, help="Number of prompts.")] = 8
    batch_size: BatchSize = 1
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Maximum number of tokens per answer.", show_default="128")
    ] = None
    temperature: Annotated[
        float | None, setting("temperature", min=0.0, show_default="0; for images that of the model")
    ] = None
    guidance_scale: GuidanceScale = None
    num_inference_steps: HeadSteps = None
    last_step_noise: LastStepNoise = False

    @property
    def source(self) -> str:
        """Folder or hub id of the model, by default the reference model for the task."""
        return self.model or reference_model(self._reference)

    def announce(self) -> str:
        """Return `source`, after a note that the model will be loaded."""
        return announce(self.model, self._reference)

    @property
    def _reference(self) -> str:
        return REFERENCE_IMAGE if self.task == "generate" else REFERENCE

    @property
    def settings(self) -> Keywords:
        """The keywords of every call that are not None."""
        own = {name: value for name, value in vars(self).items() if name in CALL_FIELDS}
        del own["batch_size"]  # the command makes the batches
        return given_of(**{**own, "last_step_noise": self.last_step_noise or None})

    @property
    def title(self) -> str | None:
        """Short name of the prompts, for reports."""
        return "own prompts" if self.prompts or self.images else self.prompt_file or self.task

    def examples(self) -> list[Example]:
        """The user's own prompts and images, or those of the prompt file; [] without either."""
        from mmspec.evaluation.examples import own_examples
        from mmspec.evaluation.prompt_files import read_prompt_file

        if self.prompt_file is None:
            return own_examples(self.prompts or (), self.images or ()) if self.prompts or self.images else []
        if self.prompts or self.images:
            raise InputError("--prompt-file", self.prompt_file, "cannot be combined with --prompt or --image")
        return read_prompt_file(self.prompt_file, self.samples, evenly=True, recordings=True)


@dataclass(frozen=True)
class Subject:
    """A loaded model and its prompts.

    Attributes:
        pipe: the pipeline.
        draws: whether it generates images.
        hears: whether it transcribes recordings.
        examples: the prompts.
        settings: keywords of every call.
        described: the effective settings, for records.
        others: returns a number of other prompts of the same kind; None if the prompts are the user's own.
        form: keyword of timed calls, the output type of images.
    """

    pipe: Any
    draws: bool
    examples: list[Example]
    settings: Keywords
    described: Json
    others: Callable[[int], list[Example]] | None = None
    form: Keywords = field(default_factory=dict)
    hears: bool = False

    def decode(self, tokens: Sequence[int]) -> str:
        """Decode the tokens of an answer, without special tokens."""
        text: str = self.pipe.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def conditions(self, source: str, batch_size: int, seed: int) -> Json:
        """Return the settings that the figures of a run depend on, for records."""
        from mmspec.evaluation.machine import environment

        about = {"model": source, "batch_size": batch_size, "seed": seed}
        return about | self.described | environment(self.pipe.device, self.pipe.dtype)

    def contender(self, choice: AcceleratorChoice) -> Contender:
        """Set up an accelerator on the pipeline."""
        from mmspec.evaluation.contenders import contender

        return contender(self.pipe, choice.name, **choice.options)


def load_subject(
    source: str, asked: Question, how: ModelOptions, defaults: Keywords, *, speech: bool = False
) -> Subject:
    """Load a model and its prompts; `defaults` are the task and settings of text.

    Raises:
        InputError: prompts and model do not fit; or it transcribes speech, without `speech`.
    """
    from mmspec.evaluation.contenders import GENERATE, load_images
    from mmspec.evaluation.examples import read_tasks, scene_examples
    from mmspec.pipelines import ImageGenerationPipeline, MMSpecPipeline, SpeechPipeline

    tasks = () if asked.task in (None, GENERATE) else read_tasks(str(asked.task), GENERATE)
    examples = asked.examples()  # raises for an unusable file, before the model is loaded
    pipe = load_pipeline(ImageGenerationPipeline if asked.task == GENERATE else MMSpecPipeline, source, how)
    if isinstance(pipe, ImageGenerationPipeline):
        if tasks:
            raise InputError("task", asked.task, f"must be {GENERATE} for an image generator")
        return image_subject(pipe, asked, examples, how.seed)
    if isinstance(pipe, SpeechPipeline):
        if not speech:
            rule = "must not be a speech model; mmspec transcribe --compare checks its transcripts"
            raise InputError("MODEL", source, rule)
        return speech_subject(pipe, asked, examples)
    if examples and examples[0].audio is not None:
        rule = f"must have prompts, not recordings; {type(pipe.model).__name__} is not a speech model"
        raise InputError("--prompt-file", asked.prompt_file, rule)
    settings = defaults | asked.settings
    task = settings.pop("task")
    is_text = getattr(pipe.processor, "image_processor", None) is None

    def of_scenes(count: int, seed: int) -> list[Example]:
        found = [one for each in tasks or (task,) for one in scene_examples(each, count, seed)]
        return [replace(one, images=()) for one in found] if is_text else load_images(found)

    described = {"task": asked.title or task, **settings}
    if examples:
        return Subject(pipe, False, load_images(examples), settings, described)
    others = partial(of_scenes, seed=how.seed + asked.samples)
    return Subject(pipe, False, of_scenes(asked.samples, how.seed), settings, described, others)


def speech_subject(pipe: SpeechPipeline, asked: Question, examples: list[Example]) -> Subject:
    """A speech model and the recordings of a prompt file."""
    from mmspec.evaluation.contenders import load_recordings

    if asked.prompt_file is None:
        rule = 'must be JSONL of recordings for a speech model: {"audio": path, "text": its words}'
        raise InputError("--prompt-file", None, rule)
    loaded = load_recordings(examples, pipe.processor.feature_extractor.sampling_rate)
    described = {"task": asked.title, "temperature": 0.0} | asked.settings
    return Subject(pipe, False, loaded, asked.settings, described, hears=True)


def image_subject(
    pipe: ImageGenerationPipeline, asked: Question, examples: list[Example], seed: int
) -> Subject:
    """An image generator with captions, classes, or the user's own prompts."""
    from mmspec.evaluation.contenders import GENERATE, image_examples

    if asked.images:
        raise InputError("--image", list(asked.images), "cannot be used with an image generator")
    if asked.max_new_tokens is not None:
        length = pipe.target.layout_of(pipe.target.grid).length
        rule = f"cannot be set, because an image of this model has {length} tokens"
        raise InputError("--max-new-tokens", asked.max_new_tokens, rule)
    described = {"task": asked.title or GENERATE} | pipe.sampling(asked.settings)
    attention = pipe.model.config._attn_implementation
    described["baseline"] = f"plain decoding through the same loop, {attention} attention"
    if examples:
        for example in examples:
            example.only_turn()  # raises for conversations, before any image is generated
        return Subject(pipe, True, examples, asked.settings, described)
    found = image_examples(pipe, asked.samples, seed)
    others = partial(image_examples, pipe, seed=seed + asked.samples)
    return Subject(pipe, True, found, asked.settings, described, others)
