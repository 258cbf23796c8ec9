"""`/v1/completions`: continuations of text or token ids, without a chat template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response

from mmspec.errors import InputError
from mmspec.open_types import Json
from mmspec.pipelines.text_stream import decode
from mmspec.serving.chat import Answer, Delta
from mmspec.serving.chat_settings import names_of, seeded, text_settings
from mmspec.serving.engine import TEXT
from mmspec.serving.errors import RequestError
from mmspec.serving.limits import ServerLimits
from mmspec.serving.models import Models
from mmspec.serving.schemas import CompletionRequest
from mmspec.validation import given_of

__all__ = ["completion_routes"]


def completion_routes(models: Models, limits: ServerLimits) -> APIRouter:
    """Return the route for completions."""
    routes = APIRouter()

    @routes.post("/v1/completions")
    async def complete(body: CompletionRequest, request: Request) -> Response:
        model = models.find(body.model, TEXT)
        prompts = list_prompts(body)
        settings = [one for _ in prompts for one in completion_settings(body, limits)]
        if len(settings) > limits.max_waiting:
            text = f"prompt must ask for at most {limits.max_waiting} answers (max_waiting); got "
            raise RequestError(400, f"{text}{len(prompts)} prompts with n={body.n}", "prompt")
        rows = [prompt for prompt in prompts for _ in range(body.n)]
        names = {**names_of(body), "prompt": "prompt", "images": "prompt"}
        ticket = models.submit(request, model, rows, settings, names)
        await ticket.entered(limits.wait_seconds)
        starts = [""] * len(rows)
        if body.echo:
            starts = [
                text_of(prompt, model.engine.pipeline.tokenizer, body.skip_special_tokens) for prompt in rows
            ]
        return await CompletionAnswer(model.name, body, ticket, limits, starts).respond()

    return routes


def list_prompts(body: CompletionRequest) -> list[str | list[int]]:
    """Return the prompts of a request, each a text or token ids."""
    given: Any = body.prompt
    return [given] if isinstance(given, str) or isinstance(given[0], int) else given


def completion_settings(body: CompletionRequest, limits: ServerLimits) -> list[dict[str, Any]]:
    """Return the settings of each choice of a prompt.

    Raises:
        RequestError: a number exceeds its limit.
        InputError: a value cannot be used, or two values contradict each other.
    """
    if body.echo and body.logprobs is not None:
        rule = "cannot be combined with `logprobs`; this server has no log-probabilities of prompts"
        raise InputError("echo", body.echo, rule)
    settings = text_settings(body, limits, body.max_tokens, "max_tokens")
    own = given_of(logprobs=body.logprobs, apply_chat_template=False, continue_final_message=True)
    return seeded(settings | own, body.seed, body.n)


def text_of(prompt: str | Sequence[int], tokenizer: Any, skip_special_tokens: bool) -> str:
    """Return the text of a prompt."""
    if isinstance(prompt, str):
        return prompt
    return decode(tokenizer, prompt, skip_special_tokens=skip_special_tokens)


class CompletionAnswer(Answer):
    """Response of `/v1/completions`."""

    body: CompletionRequest
    kind = kind_of_chunk = "text_completion"
    prefix = "cmpl"

    def _choice(self, whole: Delta) -> Json:
        return self._part(whole.index, self.starts[whole.index] + whole.text, whole, whole.reason)

    def _first_chunks(self, index: int) -> list[Json]:
        start = self.starts[index]
        return [self._part(index, start, Delta(index, "", [], None))] if start else []

    def _chunks(self, delta: Delta) -> list[Json]:
        return [self._part(delta.index, delta.text, delta, delta.reason)]

    def _part(self, index: int, text: str, delta: Delta, reason: str | None = None) -> Json:
        return {"index": index, "text": text, "logprobs": self._logprobs(delta), "finish_reason": reason}

    def _logprobs(self, delta: Delta) -> Json | None:
        if self.body.logprobs is None:
            return None
        places, entries = [place for place, _ in delta.entries], [entry for _, entry in delta.entries]
        return {
            "tokens": [entry.text for entry in entries],
            "token_logprobs": [entry.logprob for entry in entries],
            # the token itself is always among them, so that they can be one more than `logprobs`
            "top_logprobs": [{one.text: one.logprob for one in (*entry.top, entry)} for entry in entries],
            "text_offset": places,
        }
