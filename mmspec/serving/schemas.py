"""Requests in OpenAI's words: their fields, and those that are known but cannot be honoured."""

from __future__ import annotations

import logging
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from mmspec.serving.errors import RequestError

__all__ = ["ChatRequest", "ImageRequest", "Message", "refuse_impossible"]

logger = logging.getLogger(__name__)

Seed = Annotated[int, Field(ge=0, lt=2**63)]
Finite = Annotated[float, Field(allow_inf_nan=False)]

#: Fields that would change an answer and are not served, with the values that ask for nothing.
IMPOSSIBLE: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none",),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "prediction": (),
    "presence_penalty": (0,),
    "reasoning_effort": ("none",),
    "repetition_penalty": (1,),
    "response_format": ({"type": "text"},),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "web_search_options": (),
    # of images
    "background": ("auto", "opaque"),
    "image": (),
    "mask": (),
    "num_inference_steps": (),
    "partial_images": (0,),
    "quality": ("auto", "standard"),
    "stream": (False,),
    "style": (),
}


class Strict(BaseModel):
    """Base of requests: no conversions between types; unknown fields are kept, to be looked at."""

    model_config = ConfigDict(strict=True, extra="allow")


class TextPart(Strict):
    """Text of a message."""

    type: Literal["text"]
    text: str


class ImageUrl(Strict):
    """Where an image is: a `data:` URL, or an http(s) URL."""

    url: str


class ImagePart(Strict):
    """Image of a message."""

    type: Literal["image_url"]
    image_url: ImageUrl


Part = Annotated[TextPart | ImagePart, Field(discriminator="type")]


class Message(Strict):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[Part]


class StreamOptions(Strict):
    """Options of a stream."""

    include_usage: bool = False


class ChatRequest(Strict):
    """Body of `/v1/chat/completions`. What is None is the model's own; `top_k` and `min_p` are ours."""

    messages: Annotated[list[Message], Field(min_length=1)]
    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None
    top_p: Annotated[Finite, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=0)] | None = None
    min_p: Annotated[Finite, Field(ge=0, le=1)] | None = None
    n: Annotated[int, Field(ge=1)] = 1
    seed: Seed | None = None
    stop: str | list[str] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None


class ImageRequest(Strict):
    """Body of `/v1/images/generations`. What is None is the model's own."""

    prompt: Annotated[str, Field(min_length=1)]
    model: str | None = None
    n: Annotated[int, Field(ge=1)] = 1
    size: Annotated[str, Field(pattern=r"^([1-9]\d{0,4}x[1-9]\d{0,4}|auto)$")] | None = None
    response_format: Literal["b64_json"] | None = None
    output_format: Literal["png"] | None = None
    seed: Seed | None = None
    guidance_scale: Finite | None = None
    negative_prompt: str | None = None
    temperature: Annotated[Finite, Field(ge=0, le=2)] | None = None


def refuse_impossible(request: Strict) -> None:
    """Raise RequestError for a field that is known and cannot be honoured; unknown ones are logged."""
    for name, value in (request.model_extra or {}).items():
        if name not in IMPOSSIBLE:
            logger.info("a field of a request is not known and was ignored: %.40r", name)
        elif value is not None and value not in IMPOSSIBLE[name]:
            raise RequestError(400, f"{name} is not supported by this server", name, "unsupported_parameter")
