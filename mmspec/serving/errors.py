"""Error responses in OpenAI's format, with a status for each kind of error and without internal details."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

import torch
from fastapi.responses import JSONResponse

from mmspec.errors import (
    InputError,
    MissingDependencyError,
    MMSpecError,
    NumericalError,
    UnsupportedModelError,
)
from mmspec.open_types import Json

__all__ = [
    "RequestError",
    "as_request_error",
    "error_response",
    "field_error",
    "without_surrogates",
]

KINDS = {
    401: "authentication_error",
    404: "not_found_error",
    429: "rate_limit_error",
    503: "overloaded_error",
    504: "timeout_error",
}
OWN_CODES = {"unknown_parameter", "unsupported_parameter"}  # codes of `schemas`
KEY = re.compile(r"\['(\w+)'\]")


class RequestError(MMSpecError):
    """Error response to a request: status, message, OpenAI's `param` and `code`, and Retry-After seconds."""

    def __init__(
        self,
        status: int,
        message: str,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        self.status, self.code, self.retry_after = status, code, retry_after
        self.param = None if param is None else without_surrogates(param)
        super().__init__(without_surrogates(message))

    def body(self) -> Json:
        """Return the body of the response in OpenAI's format."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def without_surrogates(text: str) -> str:
    """Escape lone surrogates, which a request may contain, so that the text can be sent."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_request_error(error: BaseException, names: Mapping[str, str] | None = None) -> RequestError:
    """Convert an exception to an error response with the field names of a request.

    The texts of unexpected exceptions stay in the log.
    """
    if isinstance(error, RequestError):
        return error
    if isinstance(error, InputError):
        known, name = names or {}, re.split(r"[.\[]", error.argument, maxsplit=1)[0]
        param = known.get(error.argument)
        if param is None:
            param = known.get(name, name) + KEY.sub(r".\1", error.argument.removeprefix(name))
        return RequestError(400, param + str(error).removeprefix(error.argument), param)
    if isinstance(error, UnsupportedModelError | MissingDependencyError):
        return RequestError(400, str(error))
    if is_out_of_memory(error):
        text = "the device has too little memory for this request now; send a smaller one, or retry later"
        return RequestError(503, text, code="out_of_memory", retry_after=1)
    if isinstance(error, NumericalError):
        return RequestError(500, "the model's logits are not finite; the server log has the details")
    return RequestError(500, "internal error; the server log has the details under this request id")


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation by torch failed, on a device or on the host."""
    on_host = isinstance(error, RuntimeError) and "DefaultCPUAllocator" in str(error)
    return on_host or isinstance(error, torch.OutOfMemoryError)


def error_response(error: BaseException) -> JSONResponse:
    """Return the HTTP response for an exception."""
    answer = as_request_error(error)
    headers = {} if answer.retry_after is None else {"Retry-After": str(answer.retry_after)}
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(answer.body(), answer.status, headers)


def field_error(problems: Sequence[Json], body: object) -> RequestError:
    """Make the error for a body that pydantic refused; it reports the most deeply nested problem.

    For a field with several forms, pydantic reports a problem for each form; those of the same value are
    joined.
    """
    if problems[0]["type"] == "json_invalid":
        return RequestError(400, "the body is not valid JSON", code="invalid_json")
    paths = [find_path(problem, body) for problem in problems]
    deepest = max(paths, key=len)
    shown = [problem for path, problem in zip(paths, problems, strict=True) if path == deepest]
    where = written(deepest)
    text = "; or: ".join(dict.fromkeys(message_of(problem) for problem in shown))
    code = shown[0]["type"] if shown[0]["type"] in OWN_CODES else None
    return RequestError(400, f"{where or 'body'}: {text}", where or None, code)


def message_of(problem: Json) -> str:
    """Return the message for a problem; for a part of an unknown type, it names the known ones."""
    if problem["type"] != "union_tag_invalid":
        return str(problem["msg"])
    known, given = problem["ctx"]["expected_tags"], problem["ctx"]["tag"]
    return f"must be one of {known}, the parts that this server reads; got {given[:80]!r}"


def find_path(problem: Json, body: object) -> list[str | int]:
    """Return the keys and indices of a problem, without pydantic's names for the forms of a value."""
    path: list[str | int] = []
    value = dict(body) if isinstance(body, Mapping) else body  # a form is no dict
    places = [place for place in problem["loc"] if place != "body"]
    for place in places:
        if (isinstance(value, dict) and place in value) or (
            isinstance(value, list) and isinstance(place, int)
        ):
            path.append(place)
            value = value[place]
    is_null = bool(path) and value is None  # null counts as missing, although the key exists
    if problem["type"] == "missing" and places and not is_null:
        path.append(places[-1])
    elif problem["type"].startswith("union_tag"):
        path.append("type")
    elif "field" in problem.get("ctx", {}):
        path.append(problem["ctx"]["field"])
    return path


def written(path: Sequence[str | int]) -> str:
    """Format a path as in OpenAI's errors: `messages[2].content[0].image_url.url`."""
    parts = [f"[{place}]" if isinstance(place, int) else f".{place}"[:80] for place in path]
    return "".join(parts).removeprefix(".")
