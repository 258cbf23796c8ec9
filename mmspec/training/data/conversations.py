"""Conversations with images, tokenised for drafters: which tokens are the assistant's replies.

Written by the target's own processor and chat template. Does not know where conversations come from.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch
from jinja2 import TemplateError
from torch import Tensor

from mmspec.decoding.interfaces import Request
from mmspec.decoding.sampling import Sampler
from mmspec.drafters.copy import CopyDrafter
from mmspec.errors import InputError
from mmspec.media import load_image
from mmspec.targets import CausalTarget
from mmspec.targets.causal import to_device
from mmspec.training.data.sequences import TrainingExample, Trial, decode

__all__ = ["Conversation", "ConversationReader", "Message", "check_written", "message"]

Message = Mapping[str, Any]
ALIKE = "turns that the chat template writes alike, whatever follows; cut it after its first reply"


def message(role: str, text: str, images: int = 0) -> Message:
    """A message of one text after some images, whose data are given elsewhere."""
    parts: list[Message] = [{"type": "image"}] * images
    return {"role": role, "content": [*parts, {"type": "text", "text": text}]}


@dataclass(frozen=True)
class Conversation:
    """Chat messages in turn, and the images that they show.

    Attributes:
        messages: as chat templates take them, contents in parts; images are parts without data.
        images: whatever `load_image` takes, in the order of their parts.
        where: its name in messages.
    """

    messages: tuple[Message, ...]
    images: tuple[Any, ...] = ()
    where: str = field(default="data", compare=False)

    @property
    def replies(self) -> list[int]:
        """Indices of the assistant's messages."""
        return [turn for turn, each in enumerate(self.messages) if each["role"] == "assistant"]

    def until(self, turn: int) -> Conversation:
        """The part of the conversation before a message, with its images."""
        messages = self.messages[:turn]
        shown = sum(part["type"] == "image" for each in messages for part in each["content"])
        return replace(self, messages=messages, images=self.images[:shown])

    def opened(self) -> Conversation:
        """The conversation with its images read.

        Raises:
            MediaError: an image cannot be read; its row and its file are named.
        """
        images = []
        for image in self.images:
            name = f"{self.where}: {image}" if isinstance(image, str | Path) else self.where
            images.append(load_image(image, argument=name))
        return replace(self, images=tuple(images))

    def with_reply(self, turn: int, text: str) -> Conversation:
        """The conversation with another text in one of the assistant's messages."""
        messages = (*self.messages[:turn], message("assistant", text), *self.messages[turn + 1 :])
        return replace(self, messages=messages)


class ConversationReader:
    """Tokeniser of conversations for a target.

    Args:
        target: the model that is drafted for.
        processor: its processor, with a chat template.
    """

    def __init__(self, target: CausalTarget, processor: Any) -> None:
        self.target, self.processor = target, processor
        settings = target.model.generation_config.eos_token_id
        ends = settings if isinstance(settings, list) else [settings]
        known = [end for end in (*ends, processor.tokenizer.eos_token_id) if end is not None]
        self.end_token_ids = frozenset(known)

    def inputs(self, said: Conversation, *, answering: bool) -> dict[str, Tensor]:
        """The target's inputs for a conversation [1, L], unpadded.

        Args:
            said: what is to be read.
            answering: whether the assistant is to speak next.

        Raises:
            InputError: the chat template refuses it.
            MediaError: an image cannot be read.
        """
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
        try:
            inputs = self.processor.apply_chat_template(messages, add_generation_prompt=answering, **how)
        except TemplateError as error:  # templates refuse turns in an order they do not know
            raise InputError(said.where, said.messages, f"the chat template says: {error}"[:200]) from error
        return {
            name: value.to(self.target.dtype) if value.is_floating_point() else value
            for name, value in to_device(inputs, self.target.device).items()
            if name != "attention_mask"  # nothing is padded
        }

    def example(self, said: Conversation) -> TrainingExample:
        """The training example of a conversation: every reply is learnt up to the token that ends it.

        Raises:
            InputError: no reply, or the chat template writes what was said differently later on.
            MediaError: an image cannot be read.
        """
        said = said.opened()
        whole, text = self.inputs(said, answering=False), self.text(said, answering=False)
        ids = whole["input_ids"][0]
        learnt, ends = torch.zeros_like(ids, dtype=torch.bool), torch.tensor(sorted(self.end_token_ids))
        for turn in said.replies:
            start = self.shared(ids, text, said.until(turn), answering=True)
            last = turn + 1 == len(said.messages)
            stop = len(ids) if last else self.shared(ids, text, said.until(turn + 1), answering=False)
            closing = torch.isin(ids[start:stop], ends.to(ids)).nonzero()
            learnt[start : start + int(closing[0]) + 1 if len(closing) else stop] = True
        if not learnt.any():
            raise InputError(
                said.where, said.messages, "a conversation in which the assistant says something"
            )
        return TrainingExample(whole, int(learnt.long().argmax()), learnt)

    def shared(self, ids: Tensor, text: str, beginning: Conversation, *, answering: bool) -> int:
        """Number of a conversation's tokens [L] that it shares with its beginning."""
        if not text.startswith(self.text(beginning, answering=answering)):
            raise InputError(beginning.where, beginning.messages, ALIKE)
        first = self.inputs(beginning, answering=answering)["input_ids"][0]
        length = min(len(ids), len(first))
        # a word may join the two, and its token is then the later part's
        return int((ids[:length] == first[:length]).long().cumprod(0).sum())

    def text(self, said: Conversation, *, answering: bool) -> str:
        """A conversation as the chat template writes it."""
        return written(self.processor, said, answering=answering)

    def regenerated(self, conversations: Sequence[Conversation], new_tokens: int) -> list[Conversation]:
        """Replace the replies by the target's own, greedy, each after those that it gave before.

        A drafter imitates its target, not whoever wrote the data.

        Args:
            conversations: whose replies are replaced; they speak together, turn by turn.
            new_tokens: longest reply.
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
                words = self.processor.tokenizer.decode(tokens, skip_special_tokens=True)
                told[row] = told[row].with_reply(turn, words.strip())
        return [replace(each, images=given.images) for each, given in zip(told, conversations, strict=True)]


def written(processor: Any, said: Conversation, *, answering: bool) -> str:
    """A conversation as the chat template of a processor writes it.

    Raises:
        InputError: the template refuses it.
    """
    try:
        text: str = processor.apply_chat_template(
            list(said.messages), tokenize=False, add_generation_prompt=answering
        )
    except TemplateError as error:  # templates refuse turns in an order they do not know
        raise InputError(said.where, said.messages, f"the chat template says: {error}"[:200]) from error
    return text


def check_written(conversations: Sequence[Conversation], processor: Any) -> None:
    """Check that a chat template writes all that is said, with one conversation of each sequence of parts.

    Raises:
        InputError: it refuses turns in this order, leaves out what a role says, or writes turns differently
            later on.
    """
    kinds: dict[Any, Conversation] = {}
    for said in conversations:
        turns = ((each["role"], *(part["type"] for part in each["content"])) for each in said.messages)
        kinds.setdefault(tuple(turns), said)
    for said in kinds.values():
        text = written(processor, said, answering=False)
        for each in said.messages:
            for part in each["content"]:
                if part.get("text", "").strip() not in text:
                    allowed = (
                        f"turns that the chat template writes; it leaves out what the {each['role']} says"
                    )
                    raise InputError(said.where, part["text"], allowed)
        for turn in said.replies:
            if not text.startswith(written(processor, said.until(turn), answering=True)):
                raise InputError(said.where, said.messages, ALIKE)
