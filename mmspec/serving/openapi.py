"""The OpenAPI document: bodies and responses of the routes, errors in OpenAI's format, and the API key."""

from __future__ import annotations

from typing import Any

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi
from pydantic import BaseModel, TypeAdapter

from mmspec.open_types import Json

__all__ = ["complete_document"]


class ErrorContent(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    error: ErrorContent


class Model(BaseModel):
    id: str
    object: str
    created: int
    owned_by: str


class ModelList(BaseModel):
    object: str
    data: list[Model]


class Health(BaseModel):
    status: str
    models: list[str]


class PredictionTokens(BaseModel):
    accepted_prediction_tokens: int
    rejected_prediction_tokens: int


class Usage(BaseModel):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    completion_tokens_details: PredictionTokens


class AnswerMessage(BaseModel):
    role: str
    content: str | None


class Choice(BaseModel):
    index: int
    message: AnswerMessage
    logprobs: dict[str, Any] | None
    finish_reason: str


class ChunkChoice(BaseModel):
    index: int
    delta: dict[str, Any]
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class TextChoice(BaseModel):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None


class _Answer(BaseModel):
    id: str
    object: str
    created: int
    model: str


class ChatCompletion(_Answer):
    choices: list[Choice]
    usage: Usage


class ChatCompletionChunk(_Answer):
    choices: list[ChunkChoice]


class CompletionChunk(_Answer):
    choices: list[TextChoice]


class Completion(CompletionChunk):
    usage: Usage


class ImageData(BaseModel):
    b64_json: str


class Images(BaseModel):
    created: int
    data: list[ImageData]
    output_format: str
    size: str
    usage: dict[str, int]


class Transcript(BaseModel):
    text: str


#: Route -> what it does, and its answers by media type.
ROUTES: dict[str, tuple[str, dict[str, Any]]] = {
    "/v1/chat/completions": (
        "Generate text from text and images, whole or as server-sent events",
        {"application/json": ChatCompletion, "text/event-stream": ChatCompletionChunk},
    ),
    "/v1/completions": (
        "Continue text, whole or as server-sent events",
        {"application/json": Completion, "text/event-stream": CompletionChunk},
    ),
    "/v1/images/generations": ("Draw images from a prompt", {"application/json": Images}),
    "/v1/audio/transcriptions": (
        "Transcribe a recording",
        {"application/json": Transcript, "text/plain": str},
    ),
    "/v1/models": ("List the models of this server", {"application/json": ModelList}),
    "/v1/models/{name}": ("Describe one model", {"application/json": Model}),
    "/health": ("Tell whether the worker of each model runs", {"application/json": Health}),
    "/metrics": ("Report Prometheus metrics", {"text/plain": str}),
}


def complete_document(app: FastAPI, has_key: bool) -> None:
    """Let an application describe its routes by what they answer.

    FastAPI derives the request bodies. Responses are described here, because routes return them as JSON, and
    errors have OpenAI's format instead of FastAPI's.

    Args:
        app: the application, with all its routes.
        has_key: whether clients have to send an API key.
    """
    document: Json = {}

    def openapi() -> Json:
        if not document:
            document.update(described(app, has_key))
        return document

    app.openapi = openapi  # type: ignore[method-assign]


def described(app: FastAPI, has_key: bool) -> Json:
    """Return the OpenAPI document of an application."""
    document = get_openapi(title=app.title, version=app.version, routes=app.routes)
    schemas = document.setdefault("components", {}).setdefault("schemas", {})
    for unused in ("HTTPValidationError", "ValidationError"):
        schemas.pop(unused, None)
    failed = {"description": "Error", "content": content_of({"application/json": ErrorBody}, schemas)}
    for path, operations in document["paths"].items():
        summary, answers = ROUTES[path]
        for operation in operations.values():
            answered = {"description": "Answer", "content": content_of(answers, schemas)}
            operation |= {"summary": summary, "responses": {"200": answered, "default": failed}}
            if has_key and path.startswith("/v1/"):
                operation["security"] = [{"key": []}]
    if has_key:
        document["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    return document


def content_of(answers: dict[str, Any], schemas: dict[str, Any]) -> Json:
    """Return the content of a response by media type; adds the definitions of its parts to `schemas`."""
    content = {}
    for media_type, answer in answers.items():
        schema = TypeAdapter(answer).json_schema(ref_template="#/components/schemas/{model}")
        schemas.update(schema.pop("$defs", {}))
        if "title" in schema and schema.get("type") == "object":
            schemas[schema["title"]] = schema
            schema = {"$ref": f"#/components/schemas/{schema['title']}"}
        content[media_type] = {"schema": schema}
    return content
