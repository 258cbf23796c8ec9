"""The fields of a chat as settings of its rows."""

from __future__ import annotations

import secrets
from typing import Any

from mmspec.errors import InputError
from mmspec.serving.errors import CHAT_NAMES
from mmspec.serving.limits import ServerLimits
from mmspec.serving.models import check_at_most
from mmspec.serving.schemas import ChatRequest
from mmspec.serving.text_rules import TextRules

__all__ = ["chat_names", "chat_settings"]

MAX_STOPS = 16


def chat_settings(body: ChatRequest, limits: ServerLimits, usual: int) -> list[dict[str, Any]]:
    """The settings of each choice: choice i has the seed of the request plus i.

    Args:
        body: of the request.
        limits: of the server.
        usual: most new tokens where a request names no number.

    Raises:
        RequestError: a number above its limit.
        InputError: a value that cannot be used, or two that contradict each other.
    """
    check_at_most("n", body.n, "max_choices", limits.max_choices)
    name = chat_names(body)["max_new_tokens"]
    most: int | None = getattr(body, name)
    check_at_most(name, most or 1, "max_tokens", limits.max_tokens)
    stops = read_stops(body)
    if body.min_tokens > (most or usual):
        allowed = f"at most {most or usual}, the most tokens of this answer ({name})"
        raise InputError("min_tokens", body.min_tokens, allowed)
    if body.min_tokens and stops:
        raise InputError("min_tokens", body.min_tokens, "0 with `stop`, whose strings end an answer anywhere")
    shared: dict[str, Any] = {
        "max_new_tokens": most,
        "min_new_tokens": body.min_tokens or None,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": 0 if body.top_k == -1 else body.top_k,  # vLLM's "no limit"
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "stop_strings": stops or None,
    }
    if body.temperature and body.top_k is None:
        shared["top_k"] = 0  # a temperature alone means 50 to transformers, and no limit to OpenAI's clients
    given = {key: value for key, value in shared.items() if value is not None}
    rules = TextRules(
        tuple(body.bad_words),
        tuple(body.stop_token_ids),
        body.ignore_eos,
        body.include_stop_str_in_output,
        body.skip_special_tokens,
    )
    given |= {**turn_settings(body), "rules": rules}
    first = secrets.randbits(62) if body.seed is None else body.seed
    return [{**given, "seed": first + index} for index in range(body.n)]


def chat_names(body: ChatRequest) -> dict[str, str]:
    """Names of a chat's fields by the arguments of the pipeline that they became."""
    most = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    return {**CHAT_NAMES, "max_new_tokens": most}


def read_stops(body: ChatRequest) -> list[str]:
    """The stop strings of a chat.

    Raises:
        InputError: too many, or one that is empty.
    """
    stops = [body.stop] if isinstance(body.stop, str) else body.stop or []
    if not all(stops) or len(stops) > MAX_STOPS:
        raise InputError("stop", stops, f"up to {MAX_STOPS} strings of at least one character")
    return stops


def turn_settings(body: ChatRequest) -> dict[str, Any]:
    """Whether an answer is a turn of its own, as it is by default, or goes on with the last message.

    Raises:
        InputError: the fields contradict each other, or the last message is not the assistant's.
    """
    template, continues = dict(body.chat_template_kwargs), body.continue_final_message
    if "add_generation_prompt" in template:
        raise InputError("chat_template_kwargs", template, "add_generation_prompt beside it, not in it")
    if continues and body.add_generation_prompt:
        allowed = "false with continue_final_message, which begins no turn"
        raise InputError("add_generation_prompt", True, allowed)
    role = body.messages[-1].role
    if continues and role != "assistant":
        allowed = f"false: the last message is of the {role}, and the assistant's alone are continued"
        raise InputError("continue_final_message", True, allowed)
    if body.add_generation_prompt is False:
        template["add_generation_prompt"] = False
    return {"continue_final_message": continues, "chat_template_kwargs": template}
