"""Text pipelines under evaluation: decode conversations with an accelerator, or with plain transformers.

A pipeline is known by `TextPipeline` alone, so that evaluation stays on a floor below pipelines.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, Self

import torch

from mmspec.errors import InputError, UnsupportedModelError
from mmspec.evaluation.examples import Example
from mmspec.evaluation.speed.timing import Decode, Decoded
from mmspec.media import load_image

__all__ = [
    "AnyPipeline",
    "Contender",
    "TextPipeline",
    "contender",
    "decode_conversations",
    "encode_prompts",
    "load_images",
    "reference_inputs",
]


class AnyPipeline(Protocol):
    """Interface of every pipeline, as far as evaluation uses it."""

    model: Any
    target: Any
    accelerator: Any
    draft_processor: Any

    def set_accelerator(self, accelerator: str, **options: Any) -> Any:
        """Swap the accelerator."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the inputs."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Number format of the weights."""
        ...


class TextPipeline(AnyPipeline, Protocol):
    """Interface of a text pipeline, as far as evaluation uses it."""

    processor: Any

    def __call__(self, prompt: Any, images: Any = None, videos: Any = None, **settings: Any) -> Any:
        """Generate text."""
        ...

    @property
    def tokenizer(self) -> Any:
        """The processor's tokenizer."""
        ...


@dataclass(frozen=True)
class Contender:
    """An accelerator that was set up once on a pipeline and can be put back there at no cost.

    Attributes:
        pipe: the pipeline.
        accelerator, draft_processor: its attributes of these names.
        steps: of its target: how scoring forwards run, compiled or (None) as they are.
    """

    pipe: Any
    accelerator: Any
    draft_processor: Any
    steps: Any

    @classmethod
    def of(cls, pipe: Any) -> Self:
        """The accelerator that is on a pipeline now."""
        return cls(pipe, pipe.accelerator, pipe.draft_processor, pipe.target.steps)

    def enter(self) -> Any:
        """Put this accelerator on the pipeline, and return the pipeline."""
        self.pipe.accelerator, self.pipe.draft_processor = self.accelerator, self.draft_processor
        self.pipe.target.steps = self.steps
        return self.pipe

    def decode(self, batch: Sequence[Example], *, seeds: Sequence[int], **settings: Any) -> Decoded:
        """Decode a batch with this accelerator."""
        return decode_conversations(self.enter(), batch, seeds=seeds, **settings)

    def decoder(self, seed: int = 0, **settings: Any) -> Decode:
        """Make a function that decodes a batch with this accelerator; every example has its own noise."""
        return lambda batch: self.decode(batch, seeds=seeds_of(batch, seed), **settings)


def seeds_of(batch: Sequence[Example], seed: int) -> list[int]:
    """Seed of each example, whatever the batch that it is in."""
    return [seed ^ zlib.crc32(example.identifier.encode()) for example in batch]


def contender(pipe: TextPipeline, name: str, **options: Any) -> Contender:
    """Set an accelerator up on a pipeline; its draft model, if it has one, is loaded here and only here."""
    pipe.set_accelerator(name, **options)
    return Contender.of(pipe)


def load_images(examples: Sequence[Example]) -> list[Example]:
    """Load the images of examples, so that every decoder gets the same pixels from memory."""
    loaded = []
    for example in examples:
        argument = example.identifier or "images"
        images = tuple(load_image(image, argument=argument) for image in example.images)
        loaded.append(replace(example, images=images))
    return loaded


def decode_conversations(
    pipe: Any, batch: Sequence[Example], *, seeds: Sequence[int] | None = None, **settings: Any
) -> Decoded:
    """Decode all conversations of a batch, turn by turn; later turns see the answers to earlier ones.

    Args:
        pipe: the pipeline, or what is called like one.
        batch: conversations; row i of the n-th turn is that of the i-th conversation that has one.
        seeds: one for each conversation, for sampling.
        settings: of the calls.
    """
    conversations = [_Conversation(example, pipe.processor) for example in batch]
    tokens: list[list[int]] = [[] for _ in batch]
    stats = []
    for turn in range(max(len(example.turns) for example in batch)):
        rows = [row for row, example in enumerate(batch) if turn < len(example.turns)]
        output = pipe(
            [conversations[row].add_turn(batch[row].turns[turn]) for row in rows],
            images=[list(batch[row].images) or None for row in rows],
            videos=[list(batch[row].videos) or None for row in rows],
            apply_chat_template=conversations[0].has_template,
            seed=None if seeds is None else [seeds[row] for row in rows],
            **settings,
        )
        stats.append(output.stats)
        for row, text, ids in zip(rows, output.text, output.tokens, strict=True):
            conversations[row].add_answer(text)
            tokens[row] += ids
    return Decoded(tokens, stats)


def reference_inputs(pipe: TextPipeline, example: Example) -> dict[str, Any]:
    """Arguments of transformers' `model.generate` for the first turn, made without any code of ours.

    Raises:
        UnsupportedModelError: the example has videos, for which every family has its own conventions.
    """
    if example.videos:
        raise UnsupportedModelError("the reference is taken for text and images only, not for videos")
    prompt = _Conversation(example, pipe.processor).add_turn(example.turns[0])
    return encode_prompts(pipe, [prompt], [list(example.images)])


def encode_prompts(
    pipe: TextPipeline, prompts: Sequence[Any], images: Sequence[Any], **padding: Any
) -> dict[str, Any]:
    """Encode prompts as arguments of `model.generate`, by the model's processor alone.

    Args:
        pipe: holds the processor.
        prompts: of `_Conversation`: texts, or conversations without their images.
        images: of each prompt, in their order; or None.
        padding: of the processor.
    """
    processor, how = pipe.processor, {"return_tensors": "pt", **padding}
    if isinstance(prompts[0], str):
        shown = {"images": [list(row or ()) for row in images]} if any(images) else {}
        encoded = processor(text=list(prompts), **shown, **how)
    else:
        is_text = processor is pipe.tokenizer
        conversations = [
            _with_images(prompt, row, is_text) for prompt, row in zip(prompts, images, strict=True)
        ]
        how |= {"tokenize": True, "add_generation_prompt": True, "return_dict": True}
        encoded = processor.apply_chat_template(conversations, **how)
    return {
        name: value.to(pipe.device, pipe.dtype if value.is_floating_point() else value.dtype)
        for name, value in encoded.items()
        if isinstance(value, torch.Tensor)
    }


def _with_images(messages: Sequence[Mapping[str, Any]], images: Any, is_text: bool) -> list[dict[str, Any]]:
    """Chat messages with their images in their places; for models of text alone, with strings as contents."""
    if is_text:
        return [{**one, "content": "".join(part["text"] for part in one["content"])} for one in messages]
    unplaced = iter(images or ())
    return [
        {
            **one,
            "content": [
                {**part, "image": next(unplaced)} if part["type"] == "image" else part
                for part in one["content"]
            ],
        }
        for one in messages
    ]


class _Conversation:
    """A conversation so far: chat messages, or running text for a model without a chat template."""

    def __init__(self, example: Example, processor: Any) -> None:
        self.has_template = getattr(processor, "chat_template", None) is not None
        kinds = ["image"] * len(example.images) + ["video"] * len(example.videos)
        self._first = [{"type": kind} for kind in kinds]
        self._messages: list[dict[str, Any]] = []
        self._text = ""
        if not self.has_template and self._first:
            token = getattr(processor, "image_token", None)
            if token is None or example.videos:
                allowed = "text alone: the model has no chat template to place them with"
                raise InputError("images", example.identifier, allowed)
            self._text = token * len(example.images) + "\n"

    def add_turn(self, turn: str) -> Any:
        """Add a user turn; return the prompt."""
        if not self.has_template:
            self._text += turn
            return self._text
        opening = [] if self._messages else self._first
        self._messages.append({"role": "user", "content": [*opening, {"type": "text", "text": turn}]})
        return list(self._messages)

    def add_answer(self, answer: str) -> None:
        """Add the model's answer."""
        self._text += answer + "\n"
        self._messages.append({"role": "assistant", "content": [{"type": "text", "text": answer}]})
