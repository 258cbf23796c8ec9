"""Request schemas with the fields of OpenAI, vLLM and SGLang: each is supported, ignored, or refused by name.

Refused fields are accepted with values that have no effect. Null counts as not given, in every field.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, Self

from fastapi import UploadFile
from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator
from pydantic_core import PydanticCustomError

from mmspec.call_fields import CALL_FIELDS
from mmspec.errors import shorten
from mmspec.messages import MEDIA_URL, PARTS, TEMPLATE_KEYS, UNSUPPORTED_KEYS, asks_nothing
from mmspec.serving.errors import without_surrogates
from mmspec.serving.parsing.tool_formats import TOOL_NAME

__all__ = [
    "BODIES",
    "CHAT_IGNORED",
    "CHAT_REFUSED",
    "MESSAGE_REFUSED",
    "Call",
    "ChatRequest",
    "CompletionRequest",
    "ImagePart",
    "ImageRequest",
    "Message",
    "NamedTool",
    "Strict",
    "TextRequest",
    "Tool",
    "TranscriptionRequest",
]

MOST_ITEMS = 1000  # of bad words and biases
MOST_PROMPTS = 1000
MOST_TOOLS = 128  # as OpenAI
MOST_DEPTH = 64

#: Bookkeeping fields of clients, which do not affect the response.
BOOKKEEPING = {"metadata", "request_id", "rid", "safety_identifier", "session_id", "store", "user"}

TEXT_IGNORED = frozenset(BOOKKEEPING | {"cache_salt", "extra_key"})
CHAT_IGNORED = frozenset(
    TEXT_IGNORED
    | {"prompt_cache_key", "prompt_cache_options", "prompt_cache_retention"}
    | {"prediction", "service_tier", "stream_reasoning"}
)
IMAGE_IGNORED = frozenset(BOOKKEEPING | {"moderation"})


def _neutral(values: tuple[Any, ...], names: str) -> dict[str, tuple[Any, ...]]:
    """Map names of fields to the values without effect."""
    return dict.fromkeys(names.split(), values)


#: Unsupported fields of all text requests, with the values that have no effect.
TEXT_REFUSED = {
    **_neutral(  # vLLM's
        (),
        "guided_decoding_backend guided_whitespace_pattern prompt_logprobs repetition_detection "
        "structural_tag thinking_token_budget truncate_prompt_tokens truncation_side",
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
        (), "custom_logit_processor lora_path session_params stop_regex"
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
        (), "audio moderation web_search_options"
    ),
    "function_call": ("none",),
    "functions": ([],),
    "modalities": (["text"],),
    **_neutral((), "chat_template input_ids thinking_budget"),  # vLLM's and SGLang's
    "add_special_tokens": (False,),
    **_neutral(([],), "documents"),
    **_neutral(({},), "media_io_kwargs mm_processor_kwargs"),
    **_neutral((), "enable_thinking reasoning thinking"),  # others'
}

#: The same for completions alone.
COMPLETION_REFUSED = TEXT_REFUSED | {"add_special_tokens": (True,), "prompt_embeds": (), "suffix": ("",)}

#: The same for messages.
MESSAGE_REFUSED = {"thinking": TEMPLATE_KEYS["thinking"], **UNSUPPORTED_KEYS}

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
#: Fields that have another name here, or that OpenAI has replaced, with the names to use.
TEXT_REPLACED = {"lora_path": "model"}
CHAT_REPLACED = TEXT_REPLACED | {"function_call": "tool_choice", "functions": "tools"}
#: Fields of messages, and the role whose messages have them.
ROLES = {"tool_call_id": "tool", "tool_calls": "assistant"}

ToolName = Annotated[str, Field(pattern=f"^{TOOL_NAME}$")]
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
        replaced: refused fields that a newer one has replaced.
    """

    model_config = ConfigDict(strict=True)
    ignored: ClassVar[frozenset[str]] = frozenset()
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {}
    replaced: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _check_names(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        given = {name: value for name, value in data.items() if value is not None}
        own = {field.alias or name for name, field in cls.model_fields.items()}
        for name, value in given.items():
            if name not in own and name not in cls.ignored:
                cls._check_neutral(name, value)
        return given

    @classmethod
    def _check_neutral(cls, name: str, value: Any) -> None:
        neutral = cls.refused.get(name)
        if neutral is None:
            own = {field.alias or known for known, field in cls.model_fields.items()}
            near = difflib.get_close_matches(name, {*own, *cls.ignored, *cls.refused}, n=1)
            hint = f"did you mean {near[0]!r}?" if near else "the documentation of `mmspec serve` lists them"
            raise _error("unknown_parameter", name, f"this server has no such field; {hint}")
        if not asks_nothing(value, neutral):
            others = "".join(f", or send {json.dumps(one)}" for one in neutral)
            todo = f"use {cls.replaced[name]}" if name in cls.replaced else "leave it out"
            text = f"not supported by this server; {todo}{others}; got {shorten(value)}"
            raise _error("unsupported_parameter", name, text)


def is_deep(value: Any) -> bool:
    """Whether a JSON value has more than `MOST_DEPTH` objects and lists within each other."""
    level = [value]
    for _ in range(MOST_DEPTH):
        lists = [list(one.values()) if isinstance(one, dict) else one for one in level]
        level = [item for one in lists if isinstance(one, list) for item in one]
    return bool(level)


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


class CalledFunction(Strict):
    """Name and arguments of a call; the arguments are the JSON text of an object."""

    name: ToolName
    arguments: str

    @field_validator("arguments")
    @classmethod
    def _check_arguments(cls, arguments: str) -> str:
        try:
            value = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            value = None
        if not isinstance(value, dict) or is_deep(value):
            text = f"must be the JSON text of an object; got {shorten(arguments)}"
            raise PydanticCustomError("arguments", "{text}", {"text": without_surrogates(text)})
        return arguments or "{}"


class Call(Strict):
    """One call of a tool, in a message of the assistant."""

    ignored = frozenset({"index"})
    id: str
    type: Literal["function"] = "function"
    function: CalledFunction


class Message(Strict):
    """One message of a conversation; only messages of the assistant may have no content."""

    refused = MESSAGE_REFUSED
    replaced = {"function_call": "tool_calls"}
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[Part]
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[Call] = []
    reasoning: str | None = None
    reasoning_content: str | None = None

    @model_validator(mode="after")
    def _check_role(self) -> Self:
        if self.role == "tool" and self.tool_call_id is None:
            raise _error("role", "tool_call_id", "must be set in messages of the role tool")
        for name, role in ROLES.items():
            if getattr(self, name) and self.role != role:
                raise _error("role", name, f"must be left out of messages of the role {self.role}")
        return self

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
    replaced = TEXT_REPLACED
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
    guided_json: dict[str, Any] | str | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None
    json_schema: dict[str, Any] | str | None = None
    regex: str | None = None
    ebnf: str | None = None
    stop_token_ids: list[TokenId] = []
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    echo: bool = False
    skip_special_tokens: bool = True


class Function(Strict):
    """Name, description and parameters of a tool; the parameters are a JSON schema."""

    name: ToolName
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None

    @field_validator("parameters")
    @classmethod
    def _check_depth(cls, parameters: dict[str, Any] | None) -> dict[str, Any] | None:
        if is_deep(parameters):
            text = f"must have at most {MOST_DEPTH} objects and lists within each other"
            raise PydanticCustomError("depth", "{text}", {"text": text})
        return parameters


class Tool(Strict):
    """A tool that the model may call."""

    type: Literal["function"]
    function: Function


class NamedFunction(Strict):
    """The name of a tool."""

    name: str


class NamedTool(Strict):
    """A tool that the model has to call."""

    type: Literal["function"]
    function: NamedFunction


class ToolSet(Strict):
    """Tools that the model may call, and whether it has to call one of them."""

    mode: Literal["auto", "required"]
    tools: Annotated[list[NamedTool], Field(min_length=1, max_length=MOST_TOOLS)]


class AllowedTools(Strict):
    """Choice among some of the tools; the prompt describes all of them."""

    type: Literal["allowed_tools"]
    allowed_tools: ToolSet


class ChatRequest(TextRequest):
    """Body of `/v1/chat/completions`."""

    ignored = CHAT_IGNORED
    refused = CHAT_REFUSED
    replaced = CHAT_REPLACED
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool = False
    top_logprobs: Annotated[int, Field(ge=0, le=20)] | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = {}
    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] = []
    tool_choice: Literal["none", "auto", "required"] | NamedTool | AllowedTools | None = None
    parallel_tool_calls: bool = True
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None = None
    verbosity: Literal["low", "medium", "high"] | None = None
    include_reasoning: bool = True
    separate_reasoning: bool = True

    @property
    def must_call(self) -> bool:
        """Whether the answer has to call a tool."""
        chosen = self.tool_choice
        if isinstance(chosen, AllowedTools):
            return chosen.allowed_tools.mode == "required"
        return chosen == "required" or isinstance(chosen, NamedTool)

    @property
    def chosen_tools(self) -> list[str]:
        """Names of the only tools that may be called; empty if all of them may be."""
        chosen = self.tool_choice
        if isinstance(chosen, AllowedTools):
            return [tool.function.name for tool in chosen.allowed_tools.tools]
        return [chosen.function.name] if isinstance(chosen, NamedTool) else []

    @model_validator(mode="after")
    def _check_tools(self) -> Self:
        names = [tool.function.name for tool in self.tools]
        if len(set(names)) < len(names):
            raise _error("tools", "tools", "must have different names")
        for chosen in self.chosen_tools:
            if chosen not in names:
                text = f"must be the name of one of the tools; got {shorten(chosen)}"
                raise _error("tool_choice", "tool_choice", text)
        if self.tool_choice == "required" and not names:
            raise _error("tool_choice", "tool_choice", "must be left out, or tools be given; got 'required'")
        return self


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


class TranscriptionRequest(Strict):
    """Form of `/v1/audio/transcriptions`. None is the default of the model; values of a form are strings."""

    model_config = ConfigDict(strict=False, arbitrary_types_allowed=True)
    ignored = frozenset({"chunking_strategy", "stream"})  # as by OpenAI's whisper-1
    refused: ClassVar[Mapping[str, tuple[Any, ...]]] = {
        "include[]": ([],),
        "known_speaker_names[]": (),
        "known_speaker_references[]": (),
    }
    file: UploadFile
    model: str | None = None
    language: Annotated[str, Field(pattern=r"^[a-zA-Z]{2,20}$")] | None = None
    prompt: Annotated[str, Field(max_length=10_000)] | None = None
    response_format: Literal["json", "text", "srt", "verbose_json", "vtt"] = "json"
    temperature: Temperature | None = None
    timestamp_granularities: Annotated[
        list[Literal["segment"]], Field(alias="timestamp_granularities[]", max_length=1)
    ] = []
    seed: Seed | None = None


#: All schemas of requests and their parts, by their names in the documentation.
BODIES: dict[str, type[Strict]] = {
    "chats": ChatRequest,
    "completions": CompletionRequest,
    "`stream_options`": StreamOptions,
    "`tools`": Tool,
    "`tools[].function`": Function,
    "messages": Message,
    "`tool_calls` of messages": Call,
    "`tool_calls[].function`": CalledFunction,
    "text parts": TextPart,
    "image parts": ImagePart,
    "`image_url`": ImageUrl,
    "images": ImageRequest,
    "transcriptions": TranscriptionRequest,
}
