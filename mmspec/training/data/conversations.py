"""Conversations as training data of drafters, tokenized by the target's processor and chat template.

Each step draws random rows, and sequences are never truncated. The source of the rows does not matter here.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jinja2 import TemplateError
from torch import Tensor
from tqdm.auto import tqdm

from mmspec.core.interfaces import Request
from mmspec.core.sampling import Sampler
from mmspec.errors import InputError
from mmspec.media import load_image
from mmspec.methods.copy.drafter import CopyDrafter
from mmspec.models.checkpoint import tokenizer_of
from mmspec.open_types import Json, Processor
from mmspec.targets import CausalTarget
from mmspec.targets.causal import to_device
from mmspec.training.data.rows import DamagedFiles, check_count, read_all
from mmspec.training.data.sequences import DrafterBatch, TrainingExample, Trial, decode
from mmspec.visual_tokens.spans import find_images

__all__ = ["Conversation", "ConversationReader", "ConversationRows", "Message", "check_written", "message"]

logger = logging.getLogger(__name__)

STAGE = 12
TRIAL_ROWS, TRIAL_TOKENS = 4, 96
ATTEMPTS = 100  # further rows that a step draws to replace skipped ones, before it raises
SAYS_SOMETHING = "must have an assistant reply that is not empty"
SHOWN_AFTER = 2.0  # seconds of checking before a progress bar appears
# exceptions of chat templates for turns in an order or with contents that they do not support
REFUSALS = (TemplateError, TypeError, ValueError, LookupError, AttributeError)
Message = Mapping[str, Any]


def message(role: str, text: str, images: int = 0) -> Message:
    """Create a message of some image parts without data, followed by a text."""
    parts: list[Message] = [{"type": "image"}] * images
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


@dataclass(frozen=True)
class Conversation:
    """Chat messages and their images.

    Attributes:
        messages: messages for chat templates, with contents in parts; image parts have no data.
        images: inputs of `load_image`, in the order of the image parts.
        where: name of the conversation in error messages.
    """

    messages: tuple[Message, ...]
    images: tuple[object, ...] = ()
    where: str = field(default="data", compare=False)

    @property
    def replies(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [turn for turn, each in enumerate(self.messages) if each["role"] == "assistant"]

    def until(self, turn: int) -> Conversation:
        """Return the conversation before a message, with its images."""
        messages = self.messages[:turn]
        shown = sum(part["type"] == "image" for each in messages for part in each["content"])
        return replace(self, messages=messages, images=self.images[:shown])

    def opened(self) -> Conversation:
        """Return the conversation with its images loaded.

        Raises:
            MediaError: an image cannot be read; the message names its row and file.
        """
        images = []
        for image in self.images:
            name = f"{self.where}: {image}" if isinstance(image, str | Path) else self.where
            images.append(load_image(image, argument=name))
        return replace(self, images=tuple(images))

    def with_reply(self, turn: int, text: str) -> Conversation:
        """Return the conversation with the text of one message of the assistant replaced."""
        messages = (*self.messages[:turn], message("assistant", text), *self.messages[turn + 1 :])
        return replace(self, messages=messages)


class ConversationReader:
    """Tokenizes conversations for a target, with its processor and chat template.

    Args:
        target: the target.
        processor: processor of the target; the tokenizer of a text-only target.
    """

    def __init__(self, target: CausalTarget, processor: Processor) -> None:
        self.target, self.processor = target, processor
        self.tokenizer: Processor = tokenizer_of(processor)
        settings = target.model.generation_config.eos_token_id
        ends = settings if isinstance(settings, list) else [settings]
        known = [end for end in (*ends, self.tokenizer.eos_token_id) if end is not None]
        self.end_token_ids = frozenset(known)

    def inputs(self, said: Conversation, *, answering: bool) -> dict[str, Tensor]:
        """Return the target's inputs for a conversation: `input_ids` [1, L], unpadded, and images.

        Args:
            said: the conversation.
            answering: whether to add the generation prompt.

        Raises:
            InputError: the chat template rejects the conversation.
            MediaError: an image cannot be read.
        """
        if self.tokenizer is self.processor:
            text, bos = written(self.processor, said, answering=answering), self.tokenizer.bos_token
            is_begun = bool(bos) and text.startswith(bos)
            inputs = self.tokenizer(text, return_tensors="pt", add_special_tokens=not is_begun)
            return tensors_of(inputs, self.target)
        images = iter(said.images)
        messages = [
            {
                "role": each["role"],
                "content": [
                    {**part, "image": load_image(next(images))} if part["type"] == "image" else part
                    for part in each["content"]
                ],
            }
            for each in said.messages
        ]
        how = {"tokenize": True, "return_dict": True, "return_tensors": "pt"}
        inputs = apply_template(self.processor, said, messages, add_generation_prompt=answering, **how)
        return tensors_of(inputs, self.target)

    def example(self, said: Conversation, turns: Sequence[int] | None = None) -> TrainingExample:
        """Return the training example of a conversation; each reply is learnt up to its end token.

        Args:
            said: the conversation.
            turns: indices of the learnt replies; by default the last sequence of `sequences` is used.

        Raises:
            InputError: there is no reply; see also `sequences`.
            MediaError: an image cannot be read.
        """
        if turns is None:
            said, turns = sequences(said, self.processor)[-1]
        said = said.opened()
        whole = self.inputs(said, answering=False)
        ids = whole["input_ids"][0]
        learnt, ends = torch.zeros_like(ids, dtype=torch.bool), torch.tensor(sorted(self.end_token_ids))
        for turn in turns:
            start = self.shared(ids, said.until(turn), answering=True)
            last = turn + 1 == len(said.messages)
            stop = len(ids) if last else self.shared(ids, said.until(turn + 1), answering=False)
            closing = torch.isin(ids[start:stop], ends.to(ids)).nonzero()
            learnt[start : start + int(closing[0]) + 1 if len(closing) else stop] = True
        if not learnt.any():
            raise InputError(said.where, said.messages, SAYS_SOMETHING)
        return TrainingExample(whole, int(learnt.long().argmax()), learnt)

    def text_places(self, inputs: Mapping[str, Tensor]) -> Tensor:
        """[L] True at the tokens of a sequence outside of image spans."""
        is_text = torch.ones_like(inputs["input_ids"][0], dtype=torch.bool)
        for span in find_images(self.target.config, inputs):
            is_text[span.start : span.stop] = False
        return is_text

    def shared(self, ids: Tensor, beginning: Conversation, *, answering: bool) -> int:
        """Number of tokens that a conversation [L] shares with its tokenized beginning."""
        first = self.inputs(beginning, answering=answering)["input_ids"][0]
        length = min(len(ids), len(first))
        # a token across the boundary belongs to the later part
        return int((ids[:length] == first[:length]).long().cumprod(0).sum())

    def regenerated(self, conversations: Sequence[Conversation], new_tokens: int) -> list[Conversation]:
        """Replace the replies by greedy replies of the target, of at most `new_tokens` tokens.

        The conversations are decoded as one batch, turn by turn.
        """
        told = [each.opened() for each in conversations]
        for turn in range(max(len(each.messages) for each in told)):
            rows = [row for row, each in enumerate(told) if turn in each.replies]
            if not rows:
                continue
            requests = [Request(self.inputs(told[row].until(turn), answering=True)) for row in rows]
            trial = Trial(requests, Sampler(), new_tokens, self.end_token_ids)
            outputs = decode(self.target, CopyDrafter(), trial).outputs()
            for row, tokens in zip(rows, outputs, strict=True):
                words = self.tokenizer.decode(tokens, skip_special_tokens=True)
                told[row] = told[row].with_reply(turn, words.strip())
        return [replace(each, images=given.images) for each, given in zip(told, conversations, strict=True)]


class ConversationRows:
    """Training data from conversations; the last four with readable images are held out.

    Args:
        reader: tokenizes for the target.
        rows: conversations with replies.
        batch_size: number of sequences per step and process.
        seed: seed of the random rows of each step.
        max_length: longer sequences, in tokens, are skipped with a warning. None uses the target's limit.
        regenerate: maximum length, in tokens, of replies that the target generates to replace those of the
            rows; 0 keeps the rows' replies.
        learn_prompts: whether to learn the target's predictions on all text, instead of on the replies alone.

    Attributes:
        skipped: too long sequences so far: row index -> numbers of messages in these sequences.
        damaged: rows so far whose images cannot be read.

    Raises:
        InputError: there are too few rows.
        MediaError: too many rows have images that cannot be read; see `DamagedFiles`.
    """

    def __init__(
        self,
        reader: ConversationReader,
        rows: Sequence[Conversation],
        batch_size: int,
        seed: int,
        *,
        max_length: int | None = None,
        regenerate: int = 0,
        learn_prompts: bool = False,
    ) -> None:
        self.reader, self.batch_size, self.seed, self.regenerate = reader, batch_size, seed, regenerate
        self.learn_prompts = learn_prompts
        text = reader.target.config.get_text_config(decoder=True)
        self.max_length = max_length or getattr(text, "max_position_embeddings", None)
        check_count(rows, TRIAL_ROWS)
        self.skipped: dict[int, set[int]] = {}
        self.damaged = DamagedFiles(len(rows))
        self.told: dict[int, Conversation] = {}
        left, held_out = list(rows), list[Conversation]()
        while left and len(held_out) < TRIAL_ROWS:
            row = left.pop()
            held_out += [row] if self.damaged.opened(row.where, row.opened) is not None else []
        if not left:
            raise InputError(
                "data", f"{len(rows)} rows", f"must have more than {TRIAL_ROWS} rows with readable images"
            )
        self.rows, self.held_out = left, held_out[::-1]

    @property
    def left_out(self) -> Json:
        """The skipped rows, for the record of the training."""
        found = {"too_long": len(self.skipped), "damaged": sorted(self.damaged.found.values())}
        return {name: value for name, value in found.items() if value}

    def batch(self, step: int, process: int) -> DrafterBatch:
        drawn, rng = self.draw(step, process)
        return DrafterBatch(tuple(example for _, example in drawn), int(rng.integers(2**62)))

    def prompts(self, step: int, process: int, new_tokens: int) -> Trial:
        """Return the rows of a step's batch, each cut before a random reply, as prompts."""
        drawn, rng = self.draw(step, process)
        requests = []
        for index, _ in drawn:
            said = self.told.get(index, self.rows[index])
            asked = said.until(int(rng.choice(said.replies)))
            requests.append(Request(self.reader.inputs(asked, answering=True)))
        longest = max(request.inputs["input_ids"].shape[1] for request in requests)
        room = new_tokens if self.max_length is None else min(new_tokens, self.max_length - longest)
        return Trial(requests, Sampler(), max(1, room), self.reader.end_token_ids)

    def draw(self, step: int, process: int) -> tuple[list[tuple[int, TrainingExample]], np.random.Generator]:
        """Return the rows of a step, as (index, sequence) pairs, and the step's random generator."""
        rng = np.random.default_rng([self.seed, STAGE, step, process])
        drawn = [int(index) for index in rng.integers(len(self.rows), size=self.batch_size + ATTEMPTS)]
        picks = zip(drawn, rng.spawn(1)[0].random(len(drawn)), strict=True)
        if self.regenerate:
            self.tell(drawn[: self.batch_size])
        fitting = (
            (index, example) for index, pick in picks if (example := self.example(index, pick)) is not None
        )
        found = list(islice(fitting, self.batch_size))
        if len(found) < self.batch_size:
            rule = f"must leave rows to train on: {len(self.skipped)} rows are longer so far"
            if self.damaged.found:
                rule += f", and {len(self.damaged.found)} rows have images that cannot be read"
            raise InputError("max_length", self.max_length, rule)
        return found, rng

    def trial(self) -> Trial:
        told = [each.until(each.replies[0]) for each in self.held_out]
        requests = [Request(self.reader.inputs(each, answering=True)) for each in told]
        return Trial(requests, Sampler(), TRIAL_TOKENS, self.reader.end_token_ids)

    def learnt_texts(self) -> Iterator[Tensor]:
        """Yield the tokens [n] of every learnt text of rows that are not held out, end tokens included."""
        ends = torch.tensor(sorted(self.reader.end_token_ids), dtype=torch.long)
        for row in self.rows:
            for turn in range(len(row.messages)) if self.learn_prompts else row.replies:
                content = row.messages[turn]["content"]
                text = "".join(part["text"] for part in content if part["type"] == "text")
                ids = self.reader.tokenizer(text, add_special_tokens=False)["input_ids"]
                yield torch.cat([torch.tensor(ids, dtype=torch.long), ends])

    def tell(self, drawn: Sequence[int]) -> None:
        """Generate the target's replies to rows that do not have them yet."""
        rows = {index: self.rows[index] for index in sorted({*drawn} - {*self.told})}
        opened = {index: self.damaged.opened(row.where, row.opened) for index, row in rows.items()}
        new = {index: said for index, said in opened.items() if said is not None}
        if new:
            told = self.reader.regenerated(list(new.values()), self.regenerate)
            for index, said in zip(new, told, strict=True):
                self.told[index] = replace(said, images=self.rows[index].images)
                try:
                    sequences(said, self.reader.processor)
                except InputError as error:  # the replies of the row itself have been checked
                    logger.warning("%s; the row keeps its own replies", error)
                    self.told[index] = self.rows[index]

    def example(self, index: int, pick: float = 0.0) -> TrainingExample | None:
        """Return a sequence of a row; None if it is too long, or the row's images cannot be read.

        Args:
            index: index of the row.
            pick: number in [0, 1) that selects one of the `sequences`.
        """
        if self.regenerate:
            self.tell([index])
        said = self.told.get(index, self.rows[index])
        parts = sequences(said, self.reader.processor)
        part, turns = parts[int(pick * len(parts))]
        if len(part.messages) in self.skipped.get(index, ()):
            return None
        opened = self.damaged.opened(
            said.where, said.opened
        )  # opens all images, so that skipping does not depend on `pick`
        if opened is None:
            return None
        example = self.reader.example(opened.until(len(part.messages)), turns)
        if self.learn_prompts:
            example = replace(example, only=self.reader.text_places(example.inputs))
        length = len(example.learnt)
        if self.max_length is None or length <= self.max_length:
            return example
        self.skipped.setdefault(index, set()).add(len(part.messages))
        logger.warning(
            "data: row %d has %d tokens and max_length is %d; %d of %d rows are skipped so far",
            index + 1,
            length,
            self.max_length,
            len(self.skipped),
            len(self.rows),
        )
        return None


def tensors_of(inputs: Mapping[str, Tensor], target: CausalTarget) -> dict[str, Tensor]:
    """Move the inputs of one unpadded sequence to the target's device and dtype."""
    return {
        name: value.to(target.dtype) if value.is_floating_point() else value
        for name, value in to_device(inputs, target.device).items()
        if name != "attention_mask"
    }


def apply_template(
    processor: Processor, said: Conversation, messages: Sequence[Message], **how: object
) -> Any:
    """Apply the chat template of a processor to the messages of a conversation.

    Raises:
        InputError: the template rejects the messages.
    """
    if tokenizer_of(processor) is processor:  # text-only templates take strings, not parts
        messages = [
            {**each, "content": "".join(part["text"] for part in each["content"])} for each in messages
        ]
    try:
        return processor.apply_chat_template(list(messages), **how)
    except REFUSALS as error:
        raise InputError(
            said.where, said.messages, f"must fit the chat template, which raised: {error}"[:200]
        ) from error


def written(processor: Processor, said: Conversation, *, answering: bool) -> str:
    """Render a conversation with the chat template of a processor."""
    text: str = apply_template(
        processor, said, said.messages, tokenize=False, add_generation_prompt=answering
    )
    return text


def sequences(said: Conversation, processor: Processor) -> list[tuple[Conversation, list[int]]]:
    """Split a conversation into the training sequences of its replies.

    One sequence with all turns suffices if the chat template renders each turn independently of the following
    turns. Templates that drop the reasoning of earlier turns, or add empty reasoning to the last, do not.
    Then each reply gets its own sequence, after the same prompt as in decoding.

    Returns:
        For each sequence, its conversation and the indices of the learnt replies.

    Raises:
        InputError: the template rejects the conversation, omits text, or does not render a reply directly
            after its generation prompt; or all replies are empty.
    """
    whole = written(processor, said, answering=False)
    alike, turns = True, []
    for turn, each in enumerate(said.messages):
        if each["role"] != "assistant":
            check_said(said.where, each, whole)
            continue
        part, prompt = said.until(turn + 1), written(processor, said.until(turn), answering=True)
        text = whole if turn + 1 == len(said.messages) else written(processor, part, answering=False)
        check_said(said.where, each, text)
        if not text.startswith(prompt):
            end = repr(prompt[-24:])
            rule = f"must have replies that the chat template renders after its generation prompt, ...{end}"
            raise InputError(said.where, each["content"], rule)
        alike = alike and whole.startswith(text)
        if text[len(prompt) :].strip():
            turns.append(turn)
    if not turns:
        raise InputError(said.where, said.messages, SAYS_SOMETHING)
    return [(said, said.replies)] if alike else [(said.until(turn + 1), [turn]) for turn in turns]


def check_said(where: str, said: Message, text: str) -> None:
    """Check that a rendered text contains all texts of a message, up to white space.

    Raises:
        InputError: a text is missing.
    """
    for part in said["content"]:
        words = part.get("text", "").strip()
        if words not in text and "".join(words.split()) not in "".join(text.split()):
            rule = f"must have turns that the chat template renders; it omits the text of the {said['role']}"
            raise InputError(where, words, rule)


def check_written(conversations: Sequence[Conversation], processor: Processor) -> None:
    """Check that a chat template renders every conversation as training needs it; see `sequences`.

    Raises:
        InputError: a conversation does not fit; the message names the first few.
    """
    shown = tqdm(conversations, desc="data", unit="row", delay=SHOWN_AFTER)
    read_all(((said.where, said) for said in shown), lambda said, _: sequences(said, processor))
