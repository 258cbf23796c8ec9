"""The subject of `bench` and `check`: a loaded model and the prompts it answers or draws."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Annotated, Any

import typer

from mmspec.call_fields import CALL_FIELDS
from mmspec.cli.loading import REFERENCE, REFERENCE_IMAGE, AcceleratorChoice, load_pipeline, reference_model
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
    from mmspec.pipelines import ImageGenerationPipeline

__all__ = ["Question", "Subject", "load_subject"]


@dataclass(frozen=True, kw_only=True)
class Question:
    """Options that say what a model is asked, and which model; None leaves it to the command or the model."""

    model: Model = None
    prompts: Annotated[list[str] | None, typer.Option("--prompt", help="What to ask; may be repeated.")] = (
        None
    )
    images: Annotated[
        list[str] | None, typer.Option("--image", help="Image to ask about (path or URL); may be repeated.")
    ] = None
    prompt_file: Annotated[
        str | None,
        typer.Option(
            help="Prompts as published: Spec-Bench, MMSpec, COCO captions, Parti, GenEval, DrawBench; or "
            "JSON, a table, or text, a prompt a line."
        ),
    ] = None
    task: Annotated[
        str | None,
        typer.Option(
            help="Without prompts of your own, on scenes: caption, describe, question, two_images, clip, "
            "story, some with commas between, all, or mixed; or generate, for models that draw."
        ),
    ] = None
    samples: Annotated[int, typer.Option(min=1, help="How many prompts.")] = 8
    batch_size: BatchSize = 1
    max_new_tokens: Annotated[
        int | None, typer.Option(min=1, help="Most tokens per answer.", show_default="128")
    ] = None
    temperature: Annotated[
        float | None, setting("temperature", min=0.0, show_default="0; for images the model's")
    ] = None
    guidance_scale: GuidanceScale = None
    num_inference_steps: HeadSteps = None
    last_step_noise: LastStepNoise = False

    @property
    def source(self) -> str:
        """Folder or hub id of the model; the reference model for the task where none is named."""
        return self.model or reference_model(REFERENCE_IMAGE if self.task == "generate" else REFERENCE)

    @property
    def settings(self) -> Keywords:
        """The keywords of every call that are given."""
        own = {name: value for name, value in vars(self).items() if name in CALL_FIELDS}
        del own["batch_size"]  # of calls that this command makes, of text too
        return given_of(**{**own, "last_step_noise": self.last_step_noise or None})

    @property
    def title(self) -> str | None:
        """The prompts in a word, for reports."""
        return "own prompts" if self.prompts or self.images else self.prompt_file or self.task

    def examples(self) -> list[Example]:
        """The user's own prompts and images, or those of their file; [] where there is nothing of theirs."""
        from mmspec.evaluation.examples import own_examples
        from mmspec.evaluation.prompt_files import read_prompt_file

        if self.prompt_file is None:
            return own_examples(self.prompts or (), self.images or ()) if self.prompts or self.images else []
        if self.prompts or self.images:
            raise InputError("--prompt-file", self.prompt_file, "either a file, or --prompt and --image")
        return read_prompt_file(self.prompt_file, self.samples, evenly=True)


@dataclass(frozen=True)
class Subject:
    """A loaded model, and what it is asked.

    Attributes:
        pipe: the pipeline.
        draws: whether it gives images.
        examples: what it is asked.
        settings: keywords of every call.
        described: what they come to, for records.
        others: makes so many other prompts of the kind; None where the prompts are the user's own.
        form: keyword of calls whose time is taken: the form of images.
    """

    pipe: Any
    draws: bool
    examples: list[Example]
    settings: Keywords
    described: Json
    others: Callable[[int], list[Example]] | None = None
    form: Keywords = field(default_factory=dict)

    def decode(self, tokens: Sequence[int]) -> str:
        """Tokens of an answer as text, without special tokens."""
        text: str = self.pipe.tokenizer.decode(tokens, skip_special_tokens=True)
        return text

    def contender(self, choice: AcceleratorChoice) -> Contender:
        """Set an accelerator up on the pipeline, here and only here."""
        from mmspec.evaluation.contenders import contender

        return contender(self.pipe, choice.name, **choice.options)


def load_subject(source: str, asked: Question, how: ModelOptions, defaults: Keywords) -> Subject:
    """Load a model and bring together what it is asked; `defaults` are the task and settings of text."""
    from mmspec.evaluation.contenders import GENERATE, load_images
    from mmspec.evaluation.examples import read_tasks, scene_examples
    from mmspec.pipelines import ImageGenerationPipeline, MMSpecPipeline

    tasks = () if asked.task in (None, GENERATE) else read_tasks(str(asked.task), GENERATE)
    examples = asked.examples()  # a file that cannot be used should not cost a load
    pipe = load_pipeline(ImageGenerationPipeline if asked.task == GENERATE else MMSpecPipeline, source, how)
    if isinstance(pipe, ImageGenerationPipeline):
        if tasks:
            raise InputError("task", asked.task, f"{GENERATE}: this model draws images")
        return image_subject(pipe, asked, examples, how.seed)
    settings = defaults | asked.settings
    task = settings.pop("task")
    is_text = getattr(pipe.processor, "image_processor", None) is None

    def of_scenes(count: int, seed: int) -> list[Example]:
        found = [one for each in tasks or (task,) for one in scene_examples(each, count, seed)]
        return [replace(one, images=()) for one in found] if is_text else load_images(found)

    def others(count: int) -> list[Example]:
        return of_scenes(count, how.seed + asked.samples)

    described = {"task": asked.title or task, **settings}
    if examples:
        return Subject(pipe, False, load_images(examples), settings, described)
    return Subject(pipe, False, of_scenes(asked.samples, how.seed), settings, described, others)


def image_subject(
    pipe: ImageGenerationPipeline, asked: Question, examples: list[Example], seed: int
) -> Subject:
    """A model that draws, with captions, classes, or prompts of one's own."""
    from mmspec.evaluation.contenders import GENERATE, image_examples

    if asked.images:
        raise InputError("--image", list(asked.images), "no images: this model draws them")
    if asked.max_new_tokens is not None:
        length = pipe.target.layout_of(pipe.target.grid).length
        allowed = f"nothing: an image of this model has {length} tokens"
        raise InputError("--max-new-tokens", asked.max_new_tokens, allowed)
    described = {"task": asked.title or GENERATE} | pipe.sampling(asked.settings)
    attention = pipe.model.config._attn_implementation
    described["baseline"] = f"plain decoding through the same loop, {attention} attention"
    if examples:
        for example in examples:
            example.only_turn()  # or it is refused before any image is drawn
        return Subject(pipe, True, examples, asked.settings, described)
    found = image_examples(pipe, asked.samples, seed)

    def others(count: int) -> list[Example]:
        return image_examples(pipe, count, seed + asked.samples)

    return Subject(pipe, True, found, asked.settings, described, others)
