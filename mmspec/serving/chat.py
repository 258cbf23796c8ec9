"""`/v1/chat/completions`: text generation from text and images, whole or streamed as server-sent events."""

from __future__ import annotations

import json
import logging
import time
import uuid
from collections.abc import AsyncIterator, Sequence
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mmspec.errors import MMSpecError
from mmspec.open_types import Json
from mmspec.pipelines.settings import DEFAULT_NEW_TOKENS
from mmspec.serving.chat_settings import chat_names, chat_settings, read_messages
from mmspec.serving.engine import Ticket
from mmspec.serving.errors import as_request_error
from mmspec.serving.limits import ServerLimits
from mmspec.serving.metrics import REASONS
from mmspec.serving.models import Models
from mmspec.serving.schemas import ChatRequest

__all__ = ["StopText", "chat_routes"]

logger = logging.getLogger(__name__)


def chat_routes(models: Models, limits: ServerLimits) -> APIRouter:
    """Return the route for chat completions."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        engine = models.find(body.model, draws=False)
        own = engine.pipeline.model.generation_config
        usual = own.max_new_tokens or own.max_length or DEFAULT_NEW_TOKENS
        settings = chat_settings(body, limits, usual)
        prompt = await to_thread.run_sync(read_messages, body.messages, limits)
        ticket = models.submit(request, engine, prompt, settings, chat_names(body))
        await ticket.entered(limits.wait_seconds)
        stops = settings[0].get("stop_strings", [])
        texts = [StopText(stops, body.include_stop_str_in_output) for _ in settings]
        answer = ChatAnswer(engine.name, ticket, limits, texts)
        if body.stream:
            usage = body.stream_options is not None and body.stream_options.include_usage
            return StreamingResponse(answer.stream(usage), media_type="text/event-stream")
        return JSONResponse(await answer.whole())

    return routes


class StopText:
    """Cuts streamed text before the first stop string, and withholds text that may be the start of one.

    Args:
        stops: stop strings, none of them empty.
        keeps: whether the text includes the stop string.
    """

    def __init__(self, stops: Sequence[str], keeps: bool = False) -> None:
        self._stops, self._keeps = stops, keeps
        self._held = ""
        self.has_ended = False

    def add(self, text: str) -> str:
        """Add text; return the text that can be sent."""
        if self.has_ended:
            return ""
        self._held += text
        found = [(place, stop) for stop in self._stops if (place := self._held.find(stop)) >= 0]
        if found:
            self.has_ended = True
            place, stop = min(found)
            return self._give(place + len(stop) * self._keeps)
        longest = max((len(stop) for stop in self._stops), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return self._give(len(self._held) - length)
        return self._give(len(self._held))

    def finish(self) -> str:
        """Return the withheld text, which is not a stop string."""
        return "" if self.has_ended else self._give(len(self._held))

    def _give(self, count: int) -> str:
        given, self._held = self._held[:count], self._held[count:]
        return given


class ChatAnswer:
    """Response to a request in the batch, whole or streamed; `texts` apply the stop strings."""

    def __init__(self, model: str, ticket: Ticket, limits: ServerLimits, texts: list[StopText]) -> None:
        self._ticket, self._seconds, self._texts = ticket, limits.run_seconds, texts
        self._outputs: list[Any] = []
        self._head = {"id": f"chatcmpl-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def _deltas(self) -> AsyncIterator[tuple[int, str, str | None]]:
        """Yield the choice, its new text, and its finish reason or None."""
        async for index, event in self._ticket.updates(self._seconds):
            text, reason = self._texts[index].add(event.text), event.finish_reason
            if reason is not None:
                text += self._texts[index].finish()
                self._outputs.append(event.output)
                reason = REASONS.get(reason, reason)
            if text or reason:
                yield index, text, reason

    async def whole(self) -> Json:
        """Return the whole response."""
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
        """Yield the response as server-sent events; an error after the first event is an event too."""
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

    def _event(self, content: Json) -> bytes:
        return encode_event({**self._head, "object": "chat.completion.chunk", **content})

    def _usage(self) -> Json:
        """Return the numbers of tokens of all choices; the prompt is counted once."""
        stats = [output.stats for output in self._outputs]
        new = sum(sum(one.new_tokens) for one in stats)
        accepted = sum(sum(one.accepted) for one in stats)
        drafted = sum(sum(one.drafted) for one in stats)
        prompt = self._ticket.prompt_tokens
        return {
            "prompt_tokens": prompt,
            "completion_tokens": new,
            "total_tokens": prompt + new,
            # choices after the first find its prompt in the prefix cache
            "prompt_tokens_details": {
                "cached_tokens": min((one.cached_prompt_tokens for one in stats), default=0)
            },
            "completion_tokens_details": {
                "accepted_prediction_tokens": accepted,
                "rejected_prediction_tokens": drafted - accepted,
            },
        }


def encode_event(content: Json) -> bytes:
    """Encode a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
