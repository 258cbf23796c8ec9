"""Request schemas with the fields of OpenAI, vLLM and SGLang: each is supported, ignored, or refused by name.

Refused fields are accepted with values that have no effect. Null counts as not given, in every field.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator
from pydantic_core import PydanticCustomError

from mmspec.call_fields import CALL_FIELDS
from mmspec.errors import shorten
from mmspec.messages import MEDIA_URL, PARTS, TEMPLATE_KEYS, UNSUPPORTED_KEYS, asks_nothing
from mmspec.serving.errors import without_surrogates

__all__ = [
    "BODIES",
    "CHAT_IGNORED",
    "CHAT_REFUSED",
    "MESSAGE_REFUSED",
    "ChatRequest",
    "CompletionRequest",
    "ImagePart",
    "ImageRequest",
    "Message",
    "Strict",
    "TextRequest",
]

MOST_ITEMS = 1000  # of bad words and biases
MOST_PROMPTS = 1000

#: Bookkeeping fields of clients, which do not affect the response.
BOOKKEEPING = {"metadata", "request_id", "rid", "safety_identifier", "session_id", "store", "user"}

TEXT_IGNORED = frozenset(BOOKKEEPING | {"cache_salt", "extra_key"})
CHAT_IGNORED = frozenset(
    TEXT_IGNORED
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"parallel_tool_calls", "separate_reasoning", "service_tier", "stream_reasoning"}
)
IMAGE_IGNORED = frozenset(BOOKKEEPING | {"moderation"})


def _neutral(values: tuple[Any, ...], names: str) -> dict[str, tuple[Any, ...]]:
    """Map names of fields to the values without effect."""
    return dict.fromkeys(names.split(), values)


#: Unsupported fields of all text requests, with the values that have no effect.
TEXT_REFUSED = {
    **_neutral(  # vLLM's
        (),
        "guided_choice guided_decoding_backend guided_grammar guided_json guided_regex "
        "guided_whitespace_pattern prompt_logprobs repetition_detection structural_tag "
        "thinking_token_budget truncate_prompt_tokens truncation_side",
    ),
    **_neutral(
        (False,),
        "return_prompt_text return_token_ids return_tokens_as_token_ids use_beam_search watermarking",
    ),
    **_neutral((1,), "best_of length_penalty stream_interval"),
    **_neutral(([],), "logits_processors"),
    **_neutral(({},), "vllm_xargs"),
    "priority": (0,),
    "spaces_between_special_tokens": (True,),
    **_neutral(  # SGLang's
        (), "custom_logit_processor ebnf json_schema lora_path regex session_params stop_regex"
    ),
    **_neutral(
        (False,),
        "no_stop_trim return_cached_tokens_details return_hidden_states return_meta_info "
        "return_prompt_token_ids return_routed_experts",
    ),
    "custom_params": ({},),
}

#: The same for chats alone.
CHAT_REFUSED = TEXT_REFUSED | {
    **_neutral(  # OpenAI's
        (), "audio moderation prediction web_search_options"
    ),
    **_neutral(("none",), "function_call reasoning_effort"),
    **_neutral(([],), "functions tools"),
    "modalities": (["text"],),
    "tool_choice": ("none", "auto"),
    "verbosity": ("medium",),
    **_neutral((), "chat_template input_ids thinking_budget"),  # vLLM's and SGLang's
    "add_special_tokens": (False,),
    "include_reasoning": (True,),
    **_neutral(([],), "documents"),
    **_neutral(({},), "media_io_kwargs mm_processor_kwargs"),
    **_neutral((), "enable_thinking reasoning thinking"),  # others'
}

#: The same for completions alone.
COMPLETION_REFUSED = TEXT_REFUSED | {"add_special_tokens": (True,), "prompt_embeds": (), "suffix": ("",)}

#: The same for messages.
MESSAGE_REFUSED = {
    key: neutral for key, neutral in {**TEMPLATE_KEYS, **UNSUPPORTED_KEYS}.items() if key != "name"
}

#: The same for image requests: fields of OpenAI and names of diffusers.
IMAGE_REFUSED = {
    **_neutral(
        (),
        "complexity frame_duration_ms height image input_fidelity mask num_inference_steps style svg top_k "
        "width",
    ),
    **_neutral((0,), "min_p partial_images"),
    **_neutral((1,), "frame_count num_images_per_prompt repetition_penalty top_p"),
    "background": ("auto", "opaque"),
    "output_compression": (100,),
    "quality": ("auto", "standard"),
    "stream": (False,),
}

#: A token id as a key of JSON objects, which are strings.
TokenKey = Annotated[str, Field(pattern=r"^[0-9]{1,9}$")]
Bias = Annotated[float, Field(ge=-100, le=100, allow_inf_nan=False)]
Prompts = Field(min_length=1, max_length=MOST_PROMPTS)
Seed = Annotated[int, Field(ge=-1, lt=2**63)]  # -1 means none, as in vLLM
TokenId = Annotated[int, Field(ge=0)]


def within(name: str, **own: float | None) -> Any:
    """Return a pydantic field with the range of a pipeline setting, which the server may narrow."""
    check: Any = CALL_FIELDS[name].check  # a `Range`
    limits: dict[str, Any] = {"gt" if check.open_below else "ge": check.low, "le": check.high, **own}
    return Field(**limits, allow_inf_nan=False)


Temperature = Annotated[float, within("temperature", le=2)]  # OpenAI's range


class Strict(BaseModel):
    """Base class of requests and their parts: no type conversions, and no unknown fields.

    A field that is null counts as not given, since clients send null for unset fields.

    Attributes:
        ignored: further fields that are accepted with any value.
        refused: fields that are refused, except with these values.
    """

    model_config = ConfigDict(strict=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        for name, value in given.items():
            if name not in cls.model_fields and name not in cls.ignored:
                cls._check_neutral(name, value)
        return given

    @classmethod
    def _check_neutral(cls, name: str, value: Any) -> None:
        neutral = cls.refused.get(name)
        if neutral is None:
            near = difflib.get_close_matches(name, {*cls.model_fields, *cls.ignored, *cls.refused}, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "the documentation of `mmspec serve` lists them"
            raise _error("unknown_parameter", name, f"this server has no such field; {hint}")
        if not asks_nothing(value, neutral):
            others = "".join(f", or send {json.dumps(one)}" for one in neutral)
            text = f"not supported by this server; leave it out{others}; got {shorten(value)}"
            raise _error("unsupported_parameter", name, text)


def _error(code: str, name: str, text: str) -> PydanticCustomError:
    """Make the error for one field of a schema; `field` in its context names the field."""
    context = {"text": without_surrogates(text), "field": without_surrogates(name)}
    return PydanticCustomError(code, "{text}", context)


class TextPart(Strict):
    """Text part of a message."""

    ignored, refused = PARTS["text"].ignored, PARTS["text"].refused
    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """Location of an image: a `data:` URL or an http(s) URL. The model's processor sets the detail."""

    refused = MEDIA_URL.refused
    url: str


class ImagePart(Strict):
    """Image part of a message."""

    ignored, refused = PARTS["image_url"].ignored, PARTS["image_url"].refused
    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(Strict):
    """One message of a conversation; only messages of the assistant may have no content."""

    refused = MESSAGE_REFUSED
    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]
    name: str | None = None

    @model_validator(mode="before")
    @classmethod
    def _fill_content(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("role") == "assistant" and data.get("content") is None:
            return {**data, "content": ""}
        return data


class StreamOptions(Strict):
    """Options of a streamed response."""

    refused = {"continuous_usage_stats": (False,), "include_obfuscation": (False,)}
    include_usage: bool = False


class TextRequest(Strict):
    """Fields of all text requests: OpenAI's, then vLLM's. None is the default of the model."""

    ignored = TEXT_IGNORED
    refused = TEXT_REFUSED
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Temperature | None = None
    top_p: Annotated[float, within("top_p")] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    presence_penalty: Annotated[float, within("presence_penalty")] | None = None
    frequency_penalty: Annotated[float, within("frequency_penalty")] | None = None
    logit_bias: Annotated[dict[TokenKey, Bias], Field(max_length=MOST_ITEMS)] = {}
    response_format: dict[str, Any] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    min_p: Annotated[float, within("min_p")] | None = None
    repetition_penalty: Annotated[float, within("repetition_penalty", le=None)] | None = None
    min_tokens: Annotated[int, Field(ge=0)] = 0
    bad_words: Annotated[list[Annotated[str, Field(min_length=1)]], Field(max_length=MOST_ITEMS)] = []
    allowed_token_ids: Annotated[list[TokenId], Field(min_length=1)] | None = None
    structured_outputs: dict[str, Any] | None = None
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    echo: bool = False
    skip_special_tokens: bool = True


class ChatRequest(TextRequest):
    """Body of `/v1/chat/completions`."""

    ignored = CHAT_IGNORED
    refused = CHAT_REFUSED
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}


class CompletionRequest(TextRequest):
    """Body of `/v1/completions`."""

    refused = COMPLETION_REFUSED
    prompt: (
        str
        | Annotated[list[str], Prompts]
        | Annotated[list[TokenId], Field(min_length=1)]
        | Annotated[list[Annotated[list[TokenId], Field(min_length=1)]], Prompts]
    )
    max_tokens: Annotated[int, Field(ge=1)] = 16
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None


class ImageRequest(Strict):
    """Body of `/v1/images/generations`. None is the default of the model."""

    ignored = IMAGE_IGNORED
    refused = IMAGE_REFUSED
    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    size: Annotated[str, Field(pattern=r"^([1-9]\d{0,4}x[1-9]\d{0,4}|auto)$")] | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    seed: Seed | None = None
    guidance_scale: Annotated[float, Field(allow_inf_nan=False)] | None = None
    negative_prompt: str | None = None
    temperature: Temperature | None = None


#: All schemas of requests and their parts, by their names in the documentation.
BODIES: dict[str, type[Strict]] = {
    "chats": ChatRequest,
    "completions": CompletionRequest,
    "`stream_options`": StreamOptions,
    "messages": Message,
    "text parts": TextPart,
    "image parts": ImagePart,
    "`image_url`": ImageUrl,
    "images": ImageRequest,
}
