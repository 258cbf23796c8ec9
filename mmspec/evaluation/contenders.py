"""Pipelines under evaluation, with one accelerator after another on the same model.

This package must not import pipelines, so that `AnyPipeline` states the interface that it uses.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from mmspec.accelerator import Accelerator
from mmspec.core.interfaces import Drafter
from mmspec.core.statistics import merge_stats
from mmspec.errors import InputError
from mmspec.evaluation.examples import Example, held_out_captions
from mmspec.evaluation.quality.variation import measure_variation
from mmspec.evaluation.speed.timing import Decode, Decoded
from mmspec.media import load_audio, load_image
from mmspec.open_types import Json, Keywords, Processor
from mmspec.scenes import COLOURS, SHAPES

__all__ = [
    "GENERATE",
    "AnyPipeline",
    "Contender",
    "contender",
    "converse",
    "count_parameters",
    "decode_conversations",
    "decode_images",
    "decode_recordings",
    "describe_accelerator",
    "encode_prompts",
    "image_examples",
    "load_images",
    "load_recordings",
    "prepare_images",
    "reference_inputs",
]

GENERATE = "generate"


class AnyPipeline(Protocol):
    """Interface of a text or image pipeline, reduced to what evaluation uses."""

    model: Any
    target: Any
    accelerator: Accelerator
    processor: Processor
    draft_processor: Processor

    def __call__(self, *args: Any, **settings: Any) -> Any: ...

    def set_accelerator(self, accelerator: str, **options: Any) -> Any: ...

    @property
    def device(self) -> torch.device: ...

    @property
    def dtype(self) -> torch.dtype: ...

    @property
    def tokenizer(self) -> Processor: ...


@dataclass(frozen=True)
class Contender:
    """An accelerator that is set up once for a pipeline and activated with `enter` at no cost.

    Attributes:
        pipe: a text or image pipeline.
        accelerator, draft_processor: the pipeline's attributes of these names.
        steps: the target's compiled scoring steps; None for eager forward passes.
    """

    pipe: Any
    accelerator: Any
    draft_processor: Processor
    steps: Any

    def enter(self) -> Any:
        """Put this accelerator on the pipeline, and return the pipeline."""
        self.pipe.accelerator, self.pipe.draft_processor = self.accelerator, self.draft_processor
        self.pipe.target.steps = self.steps
        return self.pipe

    def decode(self, batch: Sequence[Example], *, seeds: Sequence[int], **settings: object) -> Decoded:
        """Decode a batch of conversations, of recordings or of images with this accelerator."""
        decode = decode_images if draws(self.pipe) else decode_conversations
        if batch[0].audio is not None:
            decode = decode_recordings
        return decode(self.enter(), batch, seeds=seeds, **settings)

    def decoder(self, seed: int = 0, **settings: object) -> Decode:
        """Return a function that decodes a batch with this accelerator; each example has its own seed."""
        return lambda batch: self.decode(batch, seeds=seeds_of(batch, seed), **settings)

    def watch(self, batches: Sequence[Sequence[Example]], seed: int = 0, **settings: object) -> Json:
        """Decode the batches again to measure the total variation to the target, where no rule measures it.

        Returns:
            `tv`: mean and maximum, for drafters whose nodes lack part of the model's context; {} for others,
            and for models without raster order.
        """
        if self.accelerator.drafter.exactness != "lossy" or self.pipe.target.by_blocks:
            return {}
        prepared = (
            prepare_images(self.enter(), batch, seeds=seeds_of(batch, seed), **settings) for batch in batches
        )
        stats = merge_stats([measure_variation(each) for each in prepared])
        return {} if stats.tv_mean is None else {"tv": {"mean": stats.tv_mean, "max": stats.tv_max}}


def contender(pipe: AnyPipeline, name: str, **options: object) -> Contender:
    """Set up an accelerator on a pipeline; this loads its draft model, if it has one."""
    pipe.set_accelerator(name, **options)
    return Contender(pipe, pipe.accelerator, pipe.draft_processor, pipe.target.steps)


def draws(pipe: AnyPipeline) -> bool:
    """True for a pipeline of images."""
    return hasattr(pipe, "latents")


def seeds_of(batch: Sequence[Example], seed: int) -> list[int]:
    """Seed of each example, which does not depend on its batch."""
    return [seed ^ zlib.crc32(example.identifier.encode()) for example in batch]


def load_images(examples: Sequence[Example]) -> list[Example]:
    """Load the images of examples into memory, so that timings exclude files and downloads."""
    loaded = []
    for example in examples:
        argument = example.identifier or "images"
        images = tuple(load_image(image, argument=argument) for image in example.images)
        loaded.append(replace(example, images=images))
    return loaded


def load_recordings(examples: Sequence[Example], rate: int) -> list[Example]:
    """Load the recordings of examples at the rate of a model, so that timings exclude files and downloads.

    Raises:
        InputError: an example is not a recording, or it cannot be read.
    """
    loaded = []
    for example in examples:
        if example.audio is None:
            raise InputError(example.identifier, example.turns, 'must be {"audio": path, "text": its words}')
        samples = load_audio(example.audio, sampling_rate=rate, argument=example.identifier)
        loaded.append(replace(example, audio={"array": samples, "sampling_rate": rate}))
    return loaded


def decode_recordings(
    pipe: Any, batch: Sequence[Example], *, seeds: Sequence[int], temperature: float = 0.0, **settings: Any
) -> Decoded:
    """Transcribe a batch of recordings together; the seed of the first one is that of the batch."""
    settings |= {"temperature": temperature} if temperature else {}
    output = pipe(
        [example.audio for example in batch],
        batch_size=len(batch),
        seed=seeds[0],
        do_sample=temperature > 0,
        **settings,
    )
    return Decoded(output.tokens, [output.stats])


def decode_conversations(
    pipe: Any, batch: Sequence[Example], *, seeds: Sequence[int] | None = None, **settings: Any
) -> Decoded:
    """Decode all conversations of a batch, turn by turn; later turns contain the answers to earlier ones.

    Conversations without an n-th turn are not in the n-th call. `pipe` is a pipeline or a function with its
    arguments; `seeds` has one entry per conversation; `settings` are passed to every call.
    """
    conversations = [_Conversation(example, pipe.processor) for example in batch]
    tokens: list[list[int]] = [[] for _ in batch]
    stats = []
    for turn in range(max(len(example.turns) for example in batch)):
        rows = [row for row, example in enumerate(batch) if turn < len(example.turns)]
        output = pipe(
            [conversations[row].add_turn(batch[row].turns[turn]) for row in rows],
            images=[list(batch[row].images) or None for row in rows],
            apply_chat_template=conversations[0].has_template,
            seed=None if seeds is None else [seeds[row] for row in rows],
            **settings,
        )
        stats.append(output.stats)
        for row, text, ids in zip(rows, output.text, output.tokens, strict=True):
            conversations[row].add_answer(text)
            tokens[row] += ids
    return Decoded(tokens, stats)


def converse(pipe: AnyPipeline, example: Example, **settings: Any) -> Iterator[Any]:
    """Decode one conversation and yield the output of each turn; later turns contain earlier answers.

    Args:
        pipe: a text pipeline.
        example: the turns and images.
        settings: passed to each call.
    """
    conversation = _Conversation(example, pipe.processor)
    for number, turn in enumerate(example.turns):
        said = conversation.add_turn(turn)
        output = pipe(said if number else turn, images=list(example.images), **settings)
        conversation.add_answer(output.text[0])
        yield output


def reference_inputs(pipe: AnyPipeline, example: Example) -> Keywords:
    """Arguments of transformers' `model.generate` for the first turn, made with transformers alone."""
    prompt = _Conversation(example, pipe.processor).add_turn(example.turns[0])
    return encode_prompts(pipe, [prompt], [list(example.images)])


def encode_prompts(
    pipe: AnyPipeline, prompts: Sequence[Any], images: Sequence[Any], **padding: Any
) -> Keywords:
    """Encode prompts as arguments of `model.generate` with the model's processor alone.

    Args:
        pipe: the pipeline that holds the processor.
        prompts: texts, or chat messages without their images, as `_Conversation` returns them.
        images: the images of each prompt, in order; or None.
        padding: padding arguments of the processor.
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


def _with_images(messages: Sequence[Json], images: Sequence[object] | None, is_text: bool) -> list[Json]:
    """Chat messages with their images inserted; for text-only models, with strings as contents."""
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

    def __init__(self, example: Example, processor: Processor) -> None:
        self.has_template = getattr(processor, "chat_template", None) is not None
        self._first = [{"type": "image"}] * len(example.images)
        self._messages: list[Json] = []
        self._text = ""
        if not self.has_template and self._first:
            token = getattr(processor, "image_token", None)
            if token is None:
                rule = (
                    "cannot be placed in the prompt: the model has neither a chat template nor an image token"
                )
                raise InputError("images", example.identifier, rule)
            self._text = token * len(example.images) + "\n"

    def add_turn(self, turn: str) -> str | list[Json]:
        """Add a user turn and return the prompt."""
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


def decode_images(
    pipe: AnyPipeline, batch: Sequence[Example], *, seeds: Sequence[int], **settings: Any
) -> Decoded:
    """Draw all prompts or classes of a batch together, with one seed for each."""
    prompt, what = subject_of(batch)
    output = pipe(prompt, **what, seed=list(seeds), batch_size=len(batch), **settings)
    tokens = [row.tolist() if isinstance(row, Tensor) else row for row in output.tokens]  # vectors, or ids
    return Decoded(tokens, [output.stats], output.decode_seconds, output.images)


def prepare_images(pipe: Any, batch: Sequence[Example], *, seeds: Sequence[int], **settings: Any) -> Any:
    """Prepare the call that `decode_images` decodes, so that its rounds can be observed."""
    prompt, what = subject_of(batch)
    return pipe.prepare(prompt, {"seed": list(seeds), "batch_size": len(batch), **settings}, **what)


def subject_of(batch: Sequence[Example]) -> tuple[list[str] | None, Keywords]:
    """Prompts of a batch, or None and its class labels."""
    labels = [example.label for example in batch]
    if None in labels:
        return [example.only_turn() for example in batch], {}
    return None, {"class_labels": labels}


def image_examples(pipe: AnyPipeline, count: int, seed: int = 0) -> list[Example]:
    """Default prompts of an image model: captions of held-out scenes, or consecutive classes from `seed` on.

    Classes of scenes have a caption that `AttributeJudge` can score.

    Raises:
        InputError: `count` exceeds the number of captions.
    """
    config = pipe.model.config
    if getattr(config, "condition_type", None) != "class":
        captions = held_out_captions(count, seed)
        return [Example((text,), category=GENERATE, identifier=text) for text in captions]
    labels = [(seed + index) % config.num_classes for index in range(count)]
    are_scenes = config.num_classes <= len(COLOURS) * len(SHAPES)
    found = []
    for index, label in enumerate(labels):
        colour, shape = divmod(label, len(SHAPES))
        text = f"a {COLOURS[colour]} {SHAPES[shape]}" if are_scenes else f"class {label}"
        name = f"class {label}, {index}"
        found.append(Example((text,), category=GENERATE, identifier=name, label=label))
    return found


def count_parameters(accelerator: Accelerator) -> int:
    """Number of weights of the drafter's own model; 0 without one."""
    drafter: Any = accelerator.drafter
    if isinstance(inner := getattr(drafter, "head", None), Drafter):  # copies beside a head
        drafter = inner
    model = getattr(drafter, "model", None)
    if model is not None and not isinstance(model, nn.Module):
        model = model.model  # of a target
    return 0 if model is None else sum(weights.numel() for weights in model.parameters())


def describe_accelerator(accelerator: Accelerator) -> Json:
    """Window and promise of a fitted accelerator, for reports.

    Returns:
        `window`: the most nodes of one forward pass; `promise`: "exact", "tv<=x", "approximate", or "lossy"
        with its bound in words or "no bound"; `keeps`: the reference distribution, if it is not that of plain
        decoding.
    """
    drafter, promise = accelerator.drafter, accelerator.exactness
    bound = accelerator.rule.bound if drafter.exactness == "exact" else None
    kept = {"keeps": accelerator.keeps} if accelerator.keeps else {}
    return kept | {
        "window": drafter.max_nodes,
        "promise": f"lossy, {bound or 'no bound'}" if promise == "lossy" else promise,
    }
