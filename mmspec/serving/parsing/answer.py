"""The message of an answer in OpenAI's form, whole or as deltas: content, reasoning and tool calls."""

from __future__ import annotations

import secrets
import string
from collections.abc import Sequence

from mmspec.open_types import Json
from mmspec.serving.parsing.reasoning import ReasoningParser
from mmspec.serving.parsing.tool_calls import (
    CallArguments,
    CallEnd,
    CallStart,
    Content,
    Piece,
    ToolParser,
)

__all__ = ["AnswerText"]

CHARACTERS = string.ascii_letters + string.digits


class AnswerText:
    """Text of one choice: the deltas of its message, and the whole message.

    Args:
        reasoning: parser of reasoning; None if it is part of the content.
        calls: parser of tool calls; None if there are none.
        shows_reasoning: whether the message contains the reasoning.
        is_parallel: whether calls after the first one are part of the message.
        id_length: length of the ids of calls; None for OpenAI's form.
    """

    def __init__(
        self,
        reasoning: ReasoningParser | None = None,
        calls: ToolParser | None = None,
        *,
        shows_reasoning: bool = True,
        is_parallel: bool = True,
        id_length: int | None = None,
    ) -> None:
        self._reasoning, self._calls = reasoning, calls
        self._shows_reasoning, self._is_parallel, self._id_length = shows_reasoning, is_parallel, id_length
        self._thoughts = ""
        self._pieces: list[Piece] = []
        self._started = 0  # calls in the deltas

    def add(self, text: str) -> list[Json]:
        """Add text; return the deltas that it completes."""
        if self._reasoning is None:
            return self._deltas("", text)
        return self._deltas(*self._reasoning.add(text))

    def finish(self) -> list[Json]:
        """Return the deltas at the end of the text."""
        deltas = [] if self._reasoning is None else self._deltas(*self._reasoning.finish())
        return deltas if self._calls is None else deltas + self._read(self._calls.finish())

    def finish_reason(self, reason: str) -> str:
        """Return the finish reason of the message for that of the text."""
        has_calls = any(isinstance(piece, CallEnd) and piece.is_valid for piece in self._pieces)
        return "tool_calls" if has_calls and reason == "stop" else reason

    def message(self) -> Json:
        """Return the whole message; calls that are not well-formed are part of its content."""
        content = name = arguments = ""
        calls: list[Json] = []
        for piece in self._pieces:
            if isinstance(piece, Content):
                content += piece.text
            elif isinstance(piece, CallStart):
                name, arguments = piece.name, ""
            elif isinstance(piece, CallArguments):
                arguments += piece.text
            elif not piece.is_valid:
                content += piece.source
            elif self._is_parallel or not calls:
                calls.append(self._call(name, arguments))
        message: Json = {"role": "assistant", "content": content}
        if not content and (calls or self._thoughts):
            message["content"] = None
        if self._thoughts:
            message |= reasoning_fields(self._thoughts)
        return message | ({"tool_calls": calls} if calls else {})

    def _deltas(self, thought: str, text: str) -> list[Json]:
        deltas: list[Json] = []
        if thought and self._shows_reasoning:
            self._thoughts += thought
            deltas.append(reasoning_fields(thought))
        if text:
            deltas += self._read([Content(text)] if self._calls is None else self._calls.add(text))
        return deltas

    def _read(self, pieces: Sequence[Piece]) -> list[Json]:
        """Keep pieces of the message; return their deltas, one for each call at most."""
        self._pieces += pieces
        deltas: list[Json] = []
        for piece in pieces:
            text = piece.text if isinstance(piece, Content) else ""
            if isinstance(piece, CallEnd) and not piece.is_valid:
                text = piece.unsent
            if text:
                deltas.append({"content": text})
            if isinstance(piece, CallStart):
                self._started += 1
            if self._started > 1 and not self._is_parallel:
                continue
            if isinstance(piece, CallStart):
                deltas.append({"tool_calls": [{"index": self._started - 1, **self._call(piece.name, "")}]})
            elif isinstance(piece, CallArguments):
                call = {"index": self._started - 1, "function": {"arguments": piece.text}}
                deltas.append({"tool_calls": [call]})
        return deltas

    def _call(self, name: str, arguments: str) -> Json:
        """Return a call with a new id."""
        count = self._id_length or 24
        identity = "".join(secrets.choice(CHARACTERS) for _ in range(count))
        if self._id_length is None:
            identity = f"call_{identity}"
        return {"id": identity, "type": "function", "function": {"name": name, "arguments": arguments}}


def reasoning_fields(text: str) -> Json:
    """Return reasoning under the names of DeepSeek and SGLang, and of vLLM."""
    return {"reasoning_content": text, "reasoning": text}
