"""Errors as answers: OpenAI's shape, a status for each kind, and no inner workings in any of them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from fastapi.responses import JSONResponse

from mmspec.errors import InputError, MMSpecError, NumericalError, UnsupportedModelError
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
OWN_CODES = {"unknown_parameter", "unsupported_parameter"}  # of `schemas`
KEY = re.compile(r"\['(\w+)'\]")


class RequestError(MMSpecError):
    """A request that is answered with an error: OpenAI's `code`, and seconds after which it may succeed."""

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
        """The answer's body, in OpenAI's shape."""
        kind = KINDS.get(self.status, "server_error" if self.status >= 500 else "invalid_request_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}


def without_surrogates(text: str) -> str:
    """Text that can be sent: halves of characters, which a request may hold, are written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def as_request_error(error: BaseException, names: Mapping[str, str] | None = None) -> RequestError:
    """The answer to an exception, with a chat's own names; texts that are not ours stay in the log."""
    if isinstance(error, RequestError):
        return error
    if isinstance(error, InputError):
        name, _, place = error.argument.partition("[")
        param = (names or {}).get(name, name) + (KEY.sub(r".\1", f"[{place}") if place else "")
        return RequestError(400, param + str(error).removeprefix(error.argument), param)
    if isinstance(error, UnsupportedModelError):
        return RequestError(400, str(error))
    if isinstance(error, NumericalError):
        return RequestError(500, "the model's numbers are not finite; the server's log says where")
    return RequestError(500, "the server failed; its log has the details under this request's id")


def error_response(error: BaseException) -> JSONResponse:
    """The response to an exception."""
    answer = as_request_error(error)
    headers = {} if answer.retry_after is None else {"Retry-After": str(answer.retry_after)}
    if answer.status == 401:
        headers["WWW-Authenticate"] = "Bearer"
    return JSONResponse(answer.body(), answer.status, headers)


def field_error(problems: Sequence[Json], body: object) -> RequestError:
    """The error for a body in which pydantic has found problems; the deepest of them is told.

    Where a field may have several forms there is a problem for each form; those of the same value are told
    together.
    """
    if problems[0]["type"] == "json_invalid":
        return RequestError(400, "the body is not valid JSON", code="invalid_json")
    paths = [find_path(problem, body) for problem in problems]
    deepest = max(paths, key=len)
    told = [problem for path, problem in zip(paths, problems, strict=True) if path == deepest]
    where = written(deepest)
    text = "; or: ".join(dict.fromkeys(problem["msg"] for problem in told))
    code = told[0]["type"] if told[0]["type"] in OWN_CODES else None
    return RequestError(400, f"{where or 'body'}: {text}", where or None, code)


def find_path(problem: Json, body: object) -> list[str | int]:
    """The keys and indices that lead to a problem, without pydantic's names of the forms of a value."""
    path: list[str | int] = []
    value = body
    places = [place for place in problem["loc"] if place != "body"]
    for place in places:
        if (isinstance(value, dict) and place in value) or (
            isinstance(value, list) and isinstance(place, int)
        ):
            path.append(place)
            value = value[place]
    is_null = bool(path) and value is None  # which counts as missing, and was found
    if problem["type"] == "missing" and places and not is_null:
        path.append(places[-1])
    elif problem["type"].startswith("union_tag"):
        path.append("type")
    elif "field" in problem.get("ctx", {}):
        path.append(problem["ctx"]["field"])
    return path


def written(path: Sequence[str | int]) -> str:
    """A path as OpenAI writes it: `messages[2].content[0].image_url.url`."""
    parts = [f"[{place}]" if isinstance(place, int) else f".{place}"[:80] for place in path]
    return "".join(parts).removeprefix(".")
