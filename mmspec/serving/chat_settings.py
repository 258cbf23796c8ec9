"""Conversion of text requests to settings and messages of a pipeline, with the limits on images."""

from __future__ import annotations

import math
import secrets
import urllib.parse
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from mmspec.call_fields import CHAT_NAMES, SAME_IN_REQUESTS
from mmspec.errors import InputError
from mmspec.media import load_image
from mmspec.open_types import Json
from mmspec.serving.errors import RequestError
from mmspec.serving.limits import ServerLimits, check_at_most
from mmspec.serving.schemas import ChatRequest, ImagePart, Message, Strict, TextRequest
from mmspec.serving.token_entries import TokenPieces
from mmspec.serving.tool_calls import ToolRules, hidden_tokens
from mmspec.validation import given_of

__all__ = [
    "TextRules",
    "chat_names",
    "chat_settings",
    "names_of",
    "read_messages",
    "same_fields",
    "seeded",
    "text_settings",
]

MAX_STOPS = 16
#: Field names of text requests by pipeline argument.
NAMES = CHAT_NAMES | {"logprobs": "logprobs", "sequence_bias": "logit_bias"}
#: Fields with the format of an answer, each with the key of `structured_outputs` that it stands for; None for
#: a whole format. The later ones are older spellings of vLLM, and SGLang's.
FORMATS = {
    "response_format": None,
    "structured_outputs": None,
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "json_schema": "json",
    "regex": "regex",
    "ebnf": "grammar",
}


@dataclass(frozen=True)
class TextRules:
    """Fields of a text request that need the tokenizer or the vocabulary: words and token ids.

    Attributes:
        body: the request.
        shown: special tokens whose text is part of the answer although `skip_special_tokens` is set.
    """

    body: TextRequest
    shown: frozenset[str] = frozenset()

    def settings(self, pipe: Any) -> dict[str, Any]:
        """Return the settings of the pipeline for these fields.

        Raises:
            InputError: a token id is not below the vocabulary size, or a bad word is empty.
        """
        body, size = self.body, pipe.model.config.get_text_config(decoder=True).vocab_size
        listed = {
            "stop_token_ids": body.stop_token_ids,
            "allowed_token_ids": body.allowed_token_ids or [],
            "logit_bias": map(int, body.logit_bias),
        }
        for name, tokens in listed.items():
            for index, token in enumerate(tokens):
                if token >= size:
                    where = f"{name}.{token}" if name == "logit_bias" else f"{name}[{index}]"
                    raise InputError(where, token, f"must be below {size}, the vocabulary size")
        banned = [ids for index in range(len(body.bad_words)) for ids in self._spellings(pipe, index)]
        settings: dict[str, Any] = {"bad_words_ids": banned} if banned else {}
        if banned or body.stop_token_ids or body.ignore_eos:
            # transformers does not ban a token that also ends the row
            settings["eos_token_id"] = [end for end in self._ends(pipe) if [end] not in banned]
        if biases := [[[token], bias] for token, bias in self._biases().items() if bias not in (0, math.inf)]:
            settings["sequence_bias"] = biases
        if (allowed := self._allowed(pipe, banned)) is not None:
            own = pipe.model.generation_config.suppress_tokens or []
            settings["suppress_tokens"] = sorted({*range(size)} - allowed | {*own})
        return settings

    def pieces(self, pipe: Any, before: Sequence[int]) -> TokenPieces:
        """Make the incremental detokenizer of an answer that continues the text of the tokens `before`."""
        hidden = [] if self.body.include_stop_str_in_output else self._ends(pipe)
        special = hidden_tokens(pipe.tokenizer, self.shown) if self.body.skip_special_tokens else None
        if special is None:
            return TokenPieces(pipe.tokenizer, before, hidden, self.body.skip_special_tokens)
        return TokenPieces(pipe.tokenizer, before, [*hidden, *special], skip_special_tokens=False)

    def _biases(self) -> dict[int, float]:
        """Return the bias of each token; -100 bans it, and 100 excludes all tokens with other biases."""
        limits = {-100.0: -math.inf, 100.0: math.inf}
        return {int(token): limits.get(bias, bias) for token, bias in self.body.logit_bias.items()}

    def _allowed(self, pipe: Any, banned: Sequence[Sequence[int]]) -> set[int] | None:
        """Return the only tokens that are allowed; None if the request does not limit them.

        Raises:
            InputError: the other fields exclude all of these tokens.
        """
        body, biases = self.body, self._biases()
        sets = [set(body.allowed_token_ids or ()), {t for t, bias in biases.items() if bias == math.inf}]
        given = [tokens for tokens in sets if tokens]
        if not given:
            return None
        allowed = set.intersection(*given)
        excluded = {token for token, bias in biases.items() if bias == -math.inf}
        excluded |= {ids[0] for ids in banned if len(ids) == 1}
        if not allowed - excluded - {*(self._ends(pipe) if body.min_tokens else ())}:
            name = "allowed_token_ids" if body.allowed_token_ids else "logit_bias"
            rule = "must allow a token that the other fields do not exclude"
            raise InputError(name, getattr(body, name), rule)
        return allowed

    def _ends(self, pipe: Any) -> list[int]:
        own = pipe.model.generation_config.eos_token_id
        own = [] if own is None or self.body.ignore_eos else own
        return [*(own if isinstance(own, list) else [own]), *self.body.stop_token_ids]

    def _spellings(self, pipe: Any, index: int) -> list[list[int]]:
        """Return the token ids of a word, alone and after a space, as in vLLM; [] if it has no tokens."""
        tokenizer, given = pipe.tokenizer, self.body.bad_words[index]
        if not (word := given.lstrip()):
            raise InputError(f"bad_words[{index}]", given, "must contain a word")
        found = []
        for text in (word, f" {word}"):
            ids = tokenizer(text, add_special_tokens=False)["input_ids"]
            if ids and tokenizer.unk_token_id not in ids and ids not in found:
                found.append(ids)
        return found


def chat_settings(
    body: ChatRequest, limits: ServerLimits, usual: int, tools: ToolRules
) -> list[dict[str, Any]]:
    """Return the settings of each choice; `usual` is the default of `max_tokens`.

    Raises:
        RequestError: a number exceeds its limit.
        InputError: a value cannot be used, or two values contradict each other.
    """
    if body.top_logprobs and not body.logprobs:
        raise InputError("top_logprobs", body.top_logprobs, "needs `logprobs`, which must be true")
    top = (body.top_logprobs or 0) if body.logprobs else None
    settings = text_settings(body, limits, usual, chat_names(body)["max_new_tokens"])
    held = tools.settings(settings.get("response_format"))
    settings |= given_of(logprobs=top, **turn_settings(body, tools.variables), **held)
    return seeded({**settings, "rules": TextRules(body, tools.tokens)}, body.seed, body.n)


def text_settings(body: TextRequest, limits: ServerLimits, usual: int, name: str) -> dict[str, Any]:
    """Return the settings that all text requests have.

    Args:
        body: the request.
        limits: limits on requests.
        usual: default length of an answer.
        name: the field with the maximum length.

    Raises:
        RequestError, InputError: see `chat_settings`.
    """
    check_at_most("n", body.n, "max_choices", limits.max_choices)
    most: int | None = getattr(body, name)
    check_at_most(name, most or 1, "max_tokens", limits.max_tokens)
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops) or len(stops) > MAX_STOPS:
        raise InputError("stop", stops, f"must be up to {MAX_STOPS} strings of at least one character")
    if body.min_tokens > (most or usual):
        rule = f"must be at most {most or usual}, the maximum length of this answer ({name})"
        raise InputError("min_tokens", body.min_tokens, rule)
    if body.min_tokens and stops:
        raise InputError("min_tokens", body.min_tokens, "cannot be combined with `stop`")
    # -1 is vLLM's "no limit"; a temperature alone implies top_k 50 in transformers, and none for OpenAI
    has_no_limit = body.top_k == -1 or (body.top_k is None and body.temperature)
    given = given_of(
        response_format=format_of(body),
        max_new_tokens=most,
        min_new_tokens=body.min_tokens or None,
        top_k=0 if has_no_limit else body.top_k,
        stop_strings=stops or None,
        stops_in_prompt=False if stops else None,
    )
    return {**same_fields(body), **given, "rules": TextRules(body)}


def format_of(body: TextRequest) -> dict[str, Any] | None:
    """Return the format of an answer, which the pipeline reads; None for free text.

    Raises:
        InputError: two formats are given, or the format has no schema or no end.
    """
    given = given_formats(body)
    if not given:
        return None
    name, *others = given
    if others:
        raise InputError(others[0], given[others[0]], f"cannot be combined with `{name}`")
    key = FORMATS[name]
    found: Json = given[name] if key is None else {key: given[name]}
    named = found.get("json_schema")
    if found.get("type") == "json_schema" and not (isinstance(named, dict) and "schema" in named):
        raise InputError(f"{name}.json_schema", named, 'must be an object with the key "schema"')
    if body.ignore_eos and not body.stop_token_ids:
        raise InputError(
            "ignore_eos", True, f"cannot be combined with `{name}`, whose answer ends with a token"
        )
    return found


def names_of(body: TextRequest) -> dict[str, str]:
    """Return the field names of a request by pipeline argument."""
    name = next(iter(given_formats(body)), "response_format")
    whole = {} if FORMATS[name] is None else {f"response_format.{FORMATS[name]}": name}
    return {**NAMES, **whole, "response_format": name}


def given_formats(body: TextRequest) -> dict[str, Any]:
    """Return the formats of a request other than free text, by field."""
    given = {name: getattr(body, name) for name in FORMATS}
    return {name: value for name, value in given.items() if value not in (None, {"type": "text"})}


def same_fields(body: Strict) -> dict[str, Any]:
    """Return the given fields that have the same name in pipelines."""
    names = [name for name in SAME_IN_REQUESTS if name in type(body).model_fields]
    return given_of(**{name: getattr(body, name) for name in names})


def seeded(settings: dict[str, Any], seed: int | None, count: int) -> list[dict[str, Any]]:
    """Return the settings once for each choice, with consecutive seeds from the request's or a random one."""
    first = secrets.randbits(62) if seed in (None, -1) else seed
    return [{**settings, "seed": first + index} for index in range(count)]


def chat_names(body: ChatRequest) -> dict[str, str]:
    """Return the field names of a chat request by pipeline argument."""
    most = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    is_of_tools = body.must_call or (body.tools and format_of(body) is None)
    own = {"response_format": "tools"} if is_of_tools else {}
    return {**names_of(body), **own, "max_new_tokens": most}


def turn_settings(body: ChatRequest, variables: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings for a new turn (the default), or for continuing the last message."""
    template, continues = dict(variables), body.continue_final_message
    if "add_generation_prompt" in template:
        rule = "must not contain add_generation_prompt, which is a field of the request"
        raise InputError("chat_template_kwargs", template, rule)
    if continues and body.add_generation_prompt:
        raise InputError("add_generation_prompt", True, "cannot be combined with continue_final_message")
    role = body.messages[-1].role
    if continues and role != "assistant":
        rule = f"needs a last message of the assistant, not of the {role}"
        raise InputError("continue_final_message", True, rule)
    if body.add_generation_prompt is False:
        template["add_generation_prompt"] = False
    turns = {"continue_final_message": continues, "chat_template_kwargs": template}
    return {**turns, "sanitize_control_tokens": True}


def read_messages(
    messages: Sequence[Message], limits: ServerLimits, tools: ToolRules
) -> list[dict[str, Any]]:
    """Load the images of a conversation and convert it to messages of `VisionLanguagePipeline`.

    Raises:
        RequestError: there are too many images, or a URL is not allowed.
        MediaError: an image cannot be read or exceeds a limit.
    """
    parts = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    images = sum(isinstance(part, ImagePart) for part in parts)
    if images > limits.max_images:
        text = f"messages must have at most {limits.max_images} images (max_images); got {images}"
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
        read.append({"role": role, "content": given, **tools.message_keys(message)})
    return read


def check_url(url: str, where: str, limits: ServerLimits) -> None:
    """Raise RequestError unless a URL is a `data:` URL or has an allowed host."""
    if url[:5].lower() == "data:":
        return
    if not url.lower().startswith(("https://", "http://")):  # never a path of this machine
        raise RequestError(400, f"{where} must be a data:, https:// or http:// URL", where)
    if "*" in limits.url_hosts:
        return
    try:
        host = urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        host = ""
    if host not in limits.url_hosts:
        text = (
            f"{where} must be a data: URL; this server does not download from that host (--allow-url-domain)"
        )
        raise RequestError(400, text, where)
