"""`/v1/chat/completions`: text generation from text and images, whole or streamed as server-sent events."""

from __future__ import annotations

import json
import logging
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from mmspec.errors import MMSpecError
from mmspec.open_types import Json
from mmspec.pipelines.settings import DEFAULT_NEW_TOKENS
from mmspec.serving.chat_settings import chat_names, chat_settings, read_messages
from mmspec.serving.engine import TEXT, Ticket
from mmspec.serving.errors import as_request_error
from mmspec.serving.limits import ServerLimits
from mmspec.serving.metrics import REASONS
from mmspec.serving.models import Models
from mmspec.serving.parsing.answer import AnswerText
from mmspec.serving.schemas import ChatRequest, TextPart, TextRequest
from mmspec.serving.token_entries import EntryQueue, TokenEntry
from mmspec.serving.tool_calls import AnswerFormat, ToolRules

__all__ = ["Answer", "Delta", "StopText", "chat_routes"]

logger = logging.getLogger(__name__)


def chat_routes(models: Models, limits: ServerLimits, formats: Mapping[str, AnswerFormat]) -> APIRouter:
    """Return the route for chat completions; `formats` are those of each model's answers, by name."""
    routes = APIRouter()

    @routes.post("/v1/chat/completions")
    async def chat(body: ChatRequest, request: Request) -> Response:
        model = models.find(body.model, TEXT)
        engine = model.engine
        own = engine.pipeline.model.generation_config
        usual = own.max_new_tokens or own.max_length or DEFAULT_NEW_TOKENS
        tools = ToolRules(body, formats[engine.name], engine.pipeline)
        settings = chat_settings(body, limits, usual, tools)
        prompt = await to_thread.run_sync(read_messages, body.messages, limits, tools)
        ticket = models.submit(request, model, [prompt] * len(settings), settings, chat_names(body))
        await ticket.entered(limits.wait_seconds)
        starts = [echoed(body)] * len(settings)
        answer = ChatAnswer(model.name, body, ticket, limits, starts)
        answer.messages = tools.answer_texts()
        return await answer.respond()

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


@dataclass(frozen=True)
class Delta:
    """A new part of a choice.

    Attributes:
        index: of the choice.
        text: new text.
        entries: the tokens that the text completes, each with its place in the text of the choice; empty
            unless the request asks for log-probabilities.
        reason: finish reason, in the last part.
    """

    index: int
    text: str
    entries: list[tuple[int, TokenEntry]]
    reason: str | None


class Answer(ABC):
    """Response to a text request in the batch, whole or streamed.

    Args:
        model: name of the model.
        body: the request.
        ticket: its rows, which have entered the batch.
        limits: limits on requests.
        starts: text in front of each choice.

    Attributes:
        kind: of the whole response, as OpenAI's API names it.
        kind_of_chunk: of the events of a stream.
        prefix: of the id of the response.
    """

    kind: str
    kind_of_chunk: str
    prefix: str

    def __init__(
        self, model: str, body: TextRequest, ticket: Ticket, limits: ServerLimits, starts: Sequence[str]
    ) -> None:
        self.body, self.starts = body, starts
        self._ticket, self._seconds = ticket, limits.run_seconds
        stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
        self._texts = [StopText(stops, body.include_stop_str_in_output) for _ in ticket.rows]
        self._entries = [EntryQueue() for _ in ticket.rows]
        self._outputs: list[Any] = []
        self._head = {"id": f"{self.prefix}-{uuid.uuid4().hex}", "created": int(time.time()), "model": model}

    async def respond(self) -> Response:
        """Return the response, whole or streamed as the request asks."""
        if not self.body.stream:
            return JSONResponse(await self.whole())
        options = self.body.stream_options
        usage = options is not None and options.include_usage
        return StreamingResponse(self.stream(usage), media_type="text/event-stream")

    async def whole(self) -> Json:
        """Return the whole response."""
        wholes = [Delta(index, "", [], None) for index in range(len(self._texts))]
        async for delta in self._deltas():
            before = wholes[delta.index]
            text, entries = before.text + delta.text, before.entries + delta.entries
            wholes[delta.index] = Delta(delta.index, text, entries, delta.reason)
        choices = [self._choice(whole) for whole in wholes]
        return {**self._head, "object": self.kind, "choices": choices, "usage": self._usage()}

    async def stream(self, include_usage: bool) -> AsyncIterator[bytes]:
        """Yield the response as server-sent events; an error after the first event is an event too."""
        try:
            for index in range(len(self._texts)):
                for choice in self._first_chunks(index):
                    yield self._event({"choices": [choice]})
            async for delta in self._deltas():
                for choice in self._chunks(delta):
                    yield self._event({"choices": [choice]})
            if include_usage:
                yield self._event({"choices": [], "usage": self._usage()})
        except Exception as error:
            if not isinstance(error, MMSpecError):
                logger.exception("a stream has failed")
            yield encode_event(as_request_error(error).body())
        yield b"data: [DONE]\n\n"

    @abstractmethod
    def _choice(self, whole: Delta) -> Json:
        """Return a choice of the whole response."""

    @abstractmethod
    def _first_chunks(self, index: int) -> list[Json]:
        """Return the choices of a stream that come before any text."""

    @abstractmethod
    def _chunks(self, delta: Delta) -> list[Json]:
        """Return the choices of a stream for a part."""

    async def _deltas(self) -> AsyncIterator[Delta]:
        async for index, event in self._ticket.updates(self._seconds):
            text, reason = "", event.finish_reason
            for piece in event.pieces:
                self._entries[index].add(piece)
                text += self._texts[index].add(piece.text)
            if reason is not None:
                text += self._texts[index].finish()
                self._outputs.append(event.output)
                reason = REASONS.get(reason, reason)
            entries = self._entries[index].take(text, is_last=reason is not None)
            if text or entries or reason:
                yield Delta(index, text, entries, reason)

    def _event(self, content: Json) -> bytes:
        return encode_event({**self._head, "object": self.kind_of_chunk, **content})

    def _usage(self) -> Json:
        """Return the numbers of tokens of all choices; a prompt is counted once for its `n` choices."""
        stats = [output.stats for output in self._outputs]
        new = sum(sum(one.new_tokens) for one in stats)
        accepted = sum(sum(one.accepted) for one in stats)
        drafted = sum(sum(one.drafted) for one in stats)
        prompt = sum(self._ticket.prompt_tokens[:: self.body.n])
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


class ChatAnswer(Answer):
    """Response of `/v1/chat/completions`.

    Attributes:
        messages: readers of the message of each choice.
    """

    body: ChatRequest
    messages: Sequence[AnswerText]
    kind, kind_of_chunk, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def _choice(self, whole: Delta) -> Json:
        self._read(whole)
        message, start = self.messages[whole.index].message(), self.starts[whole.index]
        return {
            "index": whole.index,
            "message": {**message, "content": start + (message["content"] or "")} if start else message,
            "logprobs": self._logprobs(whole),
            "finish_reason": self.messages[whole.index].finish_reason(str(whole.reason)),
        }

    def _first_chunks(self, index: int) -> list[Json]:
        return [self._chunk(index, {"role": "assistant", "content": self.starts[index]})]

    def _chunks(self, delta: Delta) -> list[Json]:
        parts = self._read(delta)
        if not parts and delta.entries:
            parts = [{"content": ""}]
        # all tokens of a text are in the first chunk
        found = [self._logprobs(delta)] + [self._logprobs(None)] * len(parts)
        chunks = [self._chunk(delta.index, *both) for both in zip(parts, found, strict=False)]
        if delta.reason:
            reason = self.messages[delta.index].finish_reason(delta.reason)
            chunks.append(self._chunk(delta.index, {}, reason=reason))
        return chunks

    def _read(self, delta: Delta) -> list[Json]:
        """Return the deltas of the message for a new text."""
        message = self.messages[delta.index]
        parts = message.add(delta.text)
        return parts + message.finish() if delta.reason else parts

    def _chunk(
        self, index: int, delta: Json, logprobs: Json | None = None, reason: str | None = None
    ) -> Json:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": reason}

    def _logprobs(self, delta: Delta | None) -> Json | None:
        if not self.body.logprobs:
            return None
        entries = [] if delta is None else delta.entries
        content = [
            {**shown(entry), "top_logprobs": [shown(one) for one in entry.top]} for _, entry in entries
        ]
        return {"content": content, "refusal": None}


def echoed(body: ChatRequest) -> str:
    """Return the text of a last message of the assistant if the request asks for it, else ""."""
    last = body.messages[-1]
    if not body.echo or last.role != "assistant":
        return ""
    if isinstance(last.content, str):
        return last.content
    return "".join(part.text for part in last.content if isinstance(part, TextPart))


def shown(entry: TokenEntry) -> Json:
    """Return a token of a chat with its log-probability."""
    return {"token": entry.text, "logprob": entry.logprob, "bytes": [*entry.data]}


def encode_event(content: Json) -> bytes:
    """Encode a server-sent event."""
    return f"data: {json.dumps(content, ensure_ascii=False)}\n\n".encode()
