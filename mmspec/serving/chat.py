"""`/v1/chat/completions`: text from text and images, whole or as a stream of server-sent events."""

from __future__ import annotations

import json
import logging
import secrets
import time
import uuid
from collections.abc import AsyncIterator
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mmspec.errors import InputError, MMSpecError
from mmspec.serving.admission import Ticket
from mmspec.serving.errors import as_request_error
from mmspec.serving.limits import ServerLimits
from mmspec.serving.messages import read_messages
from mmspec.serving.models import Models, check_at_most
from mmspec.serving.schemas import ChatRequest, refuse_impossible
from mmspec.serving.stop_text import StopText

__all__ = ["chat_routes"]

logger = logging.getLogger(__name__)

REASONS = {"eos": "stop"}  # of a pipeline, where OpenAI has another word
MAX_STOPS = 16


def chat_routes(models: Models, limits: ServerLimits) -> APIRouter:
    """The route of chats."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        engine = models.find(body.model, draws=False)
        refuse_impossible(body)
        settings = chat_settings(body, limits)
        prompt = await to_thread.run_sync(read_messages, body.messages, limits)
        ticket = models.submit(request, engine, prompt, settings)
        await ticket.entered(limits.wait_seconds)
        answer = ChatAnswer(engine.name, ticket, limits, settings[0].get("stop_strings", []))
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(answer.stream(usage), media_type="text/event-stream")
        return JSONResponse(await answer.whole())

    return routes


def chat_settings(body: ChatRequest, limits: ServerLimits) -> list[dict[str, Any]]:
    """The settings of each choice: choice i has the seed of the request plus i.

    Raises:
        RequestError: a number above its limit.
        InputError: stop strings that cannot be used.
    """
    check_at_most("n", body.n, "max_choices", limits.max_choices)
    most = body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    check_at_most(name, most or 1, "max_tokens", limits.max_tokens)
    shared: dict[str, Any] = {
        "max_new_tokens": most,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
    }
    if body.temperature and body.top_k is None:
        shared["top_k"] = 0  # a temperature alone means 50 to transformers, and no limit to OpenAI's clients
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops) or len(stops) > MAX_STOPS:
        raise InputError("stop", stops, f"up to {MAX_STOPS} strings of at least one character")
    if stops:
        shared["stop_strings"] = stops
    given = {key: value for key, value in shared.items() if value is not None}
    first = secrets.randbits(62) if body.seed is None else body.seed
    return [{**given, "seed": first + index} for index in range(body.n)]


class ChatAnswer:
    """The answer to one request, in both forms.

    Args:
        model: its name.
        ticket: of the request, which has entered the batch.
        limits: of the server.
        stops: strings before which choices end.
    """

    def __init__(self, model: str, ticket: Ticket, limits: ServerLimits, stops: list[str]) -> None:
        self._ticket, self._seconds = ticket, limits.run_seconds
        self._texts = [StopText(stops) for _ in ticket.rows]
        self._outputs: list[Any] = []
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def _deltas(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Yield choice, new text, and why the choice has ended if it has."""
        async for index, event in self._ticket.updates(self._seconds):
            text, reason = self._texts[index].add(event.text), event.finish_reason
            if reason is not None:
                text += self._texts[index].finish()
                self._outputs.append(event.output)
                reason = REASONS.get(reason, reason)
            if text or reason:
                yield index, text, reason

    async def whole(self) -> dict[str, Any]:
        """The answer at once."""
        texts, reasons = [""] * len(self._texts), [""] * len(self._texts)
        async for index, text, reason in self._deltas():
            texts[index] += text
            reasons[index] = reason or reasons[index]
        choices = [
            {
                "index": index,
                "message": {"role": "assistant", "content": text},
                "logprobs": None,
                "finish_reason": reason,
            }
            for index, (text, reason) in enumerate(zip(texts, reasons, strict=True))
        ]
        return {**self._head, "object": "chat.completion", "choices": choices, "usage": self._usage()}

    async def stream(self, include_usage: bool) -> AsyncIterator[bytes]:
        """The answer as server-sent events; an error after the first of them is an event too."""
        try:
            for index in range(len(self._texts)):
                yield self._chunk(index, {"role": "assistant", "content": ""}, None)
            async for index, text, reason in self._deltas():
                if text:
                    yield self._chunk(index, {"content": text}, None)
                if reason:
                    yield self._chunk(index, {}, reason)
            if include_usage:
                yield self._event({"choices": [], "usage": self._usage()})
        except Exception as error:
            if not isinstance(error, MMSpecError):
                logger.exception("a stream has failed")
            yield encode_event(as_request_error(error).body())
        yield b"data: [DONE]\n\n"

    def _chunk(self, index: int, delta: dict[str, str], reason: str | None) -> bytes:
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": reason}
        return self._event({"choices": [choice]})

    def _event(self, content: dict[str, Any]) -> bytes:
        return encode_event({**self._head, "object": "chat.completion.chunk", **content})

    def _usage(self) -> dict[str, Any]:
        """Tokens of all choices; the prompt is counted once."""
        stats = [output.stats for output in self._outputs]
        new = sum(sum(one.new_tokens) for one in stats)
        accepted = sum(sum(one.accepted) for one in stats)
        drafted = sum(sum(one.drafted) for one in stats)
        prompt = self._ticket.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }


def encode_event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
