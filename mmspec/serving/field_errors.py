"""Errors of a body that does not have the form of a request: the field that is wrong, by its path."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mmspec.serving.errors import RequestError

__all__ = ["field_error"]

OWN_CODES = {"unknown_parameter", "unsupported_parameter"}


def field_error(problems: Sequence[Any], body: Any) -> RequestError:
    """The error for a body in which pydantic has found problems; the deepest of them is told.

    Where a field may have several forms there is a problem for each form; those of the same value are told
    together.

    Args:
        problems: of pydantic.
        body: in which they were found.
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


def find_path(problem: Any, body: Any) -> list[str | int]:
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
