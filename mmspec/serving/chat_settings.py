"""A chat's fields as settings of its rows, and its messages as pipelines take them, images within limits."""

from __future__ import annotations

import secrets
import urllib.parse
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.call_fields import CALL_FIELDS, CHAT_NAMES
from mmspec.errors import InputError
from mmspec.media import load_image
from mmspec.pipelines.text_stream import TextDeltas
from mmspec.serving.errors import RequestError
from mmspec.serving.limits import ServerLimits, check_at_most
from mmspec.serving.schemas import ChatRequest, ImagePart, Message, Strict
from mmspec.validation import given_of

__all__ = ["TextRules", "chat_names", "chat_settings", "read_messages", "same_fields", "seeded"]

MAX_STOPS = 16


@dataclass(frozen=True)
class TextRules:
    """Fields of a chat that only a tokenizer can read: words that are not written, tokens that end it."""

    body: ChatRequest

    def settings(self, pipe: Any) -> dict[str, Any]:
        """Settings of a pipeline that keep the rules.

        Raises:
            InputError: a token that the model does not have, or a word that is none.
        """
        size = pipe.model.config.get_text_config(decoder=True).vocab_size
        for index, token in enumerate(self.body.stop_token_ids):
            if token >= size:
                raise InputError(f"stop_token_ids[{index}]", token, f"below {size}, the model's tokens")
        banned = [ids for index in range(len(self.body.bad_words)) for ids in self._spellings(pipe, index)]
        settings: dict[str, Any] = {"bad_words_ids": banned} if banned else {}
        if banned or self.body.stop_token_ids or self.body.ignore_eos:
            # transformers lets a banned token pass where it is also one that ends the row
            settings["eos_token_id"] = [end for end in self._ends(pipe) if [end] not in banned]
        return settings

    def deltas(self, pipe: Any, before: Sequence[int]) -> TextDeltas:
        """Make the decoder of an answer that goes on with the text of the tokens before it."""
        hidden = [] if self.body.include_stop_str_in_output else self._ends(pipe)
        return TextDeltas(pipe.tokenizer, before, hidden, self.body.skip_special_tokens)

    def _ends(self, pipe: Any) -> list[int]:
        own = pipe.model.generation_config.eos_token_id
        own = [] if own is None or self.body.ignore_eos else own
        return [*(own if isinstance(own, list) else [own]), *self.body.stop_token_ids]

    def _spellings(self, pipe: Any, index: int) -> list[list[int]]:
        """Token ids of a word alone and after a space, as vLLM bans them; none if it cannot be written."""
        tokenizer, given = pipe.tokenizer, self.body.bad_words[index]
        if not (word := given.lstrip()):
            raise InputError(f"bad_words[{index}]", given, "a word")
        found = []
        for text in (word, f" {word}"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if ids and tokenizer.unk_token_id not in ids and ids not in found:
                found.append(ids)
        return found


def chat_settings(body: ChatRequest, limits: ServerLimits, usual: int) -> list[dict[str, Any]]:
    """The settings of each choice; `usual` tokens at most where a request names no number.

    Raises:
        RequestError: a number above its limit.
        InputError: a value that cannot be used, or two that contradict each other.
    """
    check_at_most("n", body.n, "max_choices", limits.max_choices)
    name = chat_names(body)["max_new_tokens"]
    most: int | None = getattr(body, name)
    check_at_most(name, most or 1, "max_tokens", limits.max_tokens)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops) or len(stops) > MAX_STOPS:
        raise InputError("stop", stops, f"up to {MAX_STOPS} strings of at least one character")
    if body.min_tokens > (most or usual):
        allowed = f"at most {most or usual}, the most tokens of this answer ({name})"
        raise InputError("min_tokens", body.min_tokens, allowed)
    if body.min_tokens and stops:
        raise InputError("min_tokens", body.min_tokens, "0 with `stop`, whose strings end an answer anywhere")
    # vLLM writes "no limit" as -1; a temperature alone means 50 to transformers, and none to OpenAI's clients
    has_no_limit = body.top_k == -1 or (body.top_k is None and body.temperature)
    given = same_fields(body) | given_of(
        max_new_tokens=most,
        min_new_tokens=body.min_tokens or None,
        top_k=0 if has_no_limit else body.top_k,
        stop_strings=stops or None,
        stops_in_prompt=False if stops else None,
        **turn_settings(body),
    )
    return seeded({**given, "rules": TextRules(body)}, body.seed, body.n)


def same_fields(body: Strict) -> dict[str, Any]:
    """The fields that are given and that pipelines have by the same names."""
    return given_of(**{name: getattr(body, name) for name in CALL_FIELDS if name in type(body).model_fields})


def seeded(settings: dict[str, Any], seed: int | None, count: int) -> list[dict[str, Any]]:
    """The settings once for each choice, with seeds that count up from the request's or a random one."""
    first = secrets.randbits(62) if seed in (None, -1) else seed
    return [{**settings, "seed": first + index} for index in range(count)]


def chat_names(body: ChatRequest) -> dict[str, str]:
    """Names of a chat's fields by the arguments of the pipeline that they became."""
    most = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return {**CHAT_NAMES, "max_new_tokens": most}


def turn_settings(body: ChatRequest) -> dict[str, Any]:
    """Whether an answer is a turn of its own, as it is by default, or goes on with the last message."""
    template, continues = dict(body.chat_template_kwargs), body.continue_final_message
    if "add_generation_prompt" in template:
        raise InputError("chat_template_kwargs", template, "add_generation_prompt beside it, not in it")
    if continues and body.add_generation_prompt:
        allowed = "false with continue_final_message, which begins no turn"
        raise InputError("add_generation_prompt", True, allowed)
    role = body.messages[-1].role
    if continues and role != "assistant":
        allowed = f"false: the last message is of the {role}, and the assistant's alone are continued"
        raise InputError("continue_final_message", True, allowed)
    if body.add_generation_prompt is False:
        template["add_generation_prompt"] = False
    turns = {"continue_final_message": continues, "chat_template_kwargs": template}
    return {**turns, "sanitize_control_tokens": True}


def read_messages(messages: Sequence[Message], limits: ServerLimits) -> list[dict[str, Any]]:
    """Load the images of a conversation and put it into the form of `VisionLanguagePipeline`.

    Raises:
        RequestError: too many images, or a URL that is not allowed.
        MediaError: an image that cannot be read, or is over a limit.
    """
    parts = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    images = sum(isinstance(part, ImagePart) for part in parts)
    if images > limits.max_images:
        text = f"messages: got {images} images; at most {limits.max_images} (max_images)"
        raise RequestError(400, text, "messages")
    read = []
    for turn, message in enumerate(messages):
        given: list[dict[str, Any]] = []
        for index, part in enumerate(
            [message.content] if isinstance(message.content, str) else message.content
        ):
            if isinstance(part, ImagePart):
                where = f"messages[{turn}].content[{index}].image_url.url"
                check_url(part.image_url.url, where, limits)
                image = load_image(part.image_url.url, argument=where, limits=limits.media)
                given.append({"type": "image", "image": image})
            else:
                given.append({"type": "text", "text": part if isinstance(part, str) else part.text})
        role = "system" if message.role == "developer" else message.role
        read.append({"role": role, "content": given, **given_of(name=message.name)})
    return read


def check_url(url: str, where: str, limits: ServerLimits) -> None:
    """Raise RequestError for what is neither a `data:` URL nor a URL of an allowed server."""
    if url[:5].lower() == "data:":
        return
    if not url.lower().startswith(("https://", "http://")):  # above all no path of this machine
        raise RequestError(400, f"{where}: pass a data: URL, or an https:// or http:// URL", where)
    if "*" in limits.url_hosts:
        return
    try:
        host = urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        host = ""
    if host not in limits.url_hosts:
        text = f"{where}: this server does not fetch from there; pass a data: URL (--allow-url-domain)"
        raise RequestError(400, text, where)
