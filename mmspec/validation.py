"""Argument checks that several packages share."""

from __future__ import annotations

from numbers import Integral, Real
from typing import Any, TypeGuard

from mmspec.errors import InputError

__all__ = [
    "check_draft_tokens",
    "given_of",
    "is_integer",
    "is_list",
    "is_number",
    "plain_numbers",
    "require_number",
    "require_unicode",
]

MAX_DRAFT_TOKENS = 512


def require_number(
    name: str, value: Any, low: float, high: float, rule: str, *, open_below: bool = False
) -> None:
    """Raise InputError with this rule unless `value` is a finite number in [low, high], or (low, high]."""
    if not is_number(value) or not low <= value <= high or (open_below and value == low):
        raise InputError(name, value, rule)


def require_unicode(name: str, text: str) -> None:
    """Raise InputError for text with lone surrogates, which cannot be encoded as UTF-8."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        raise InputError(name, "text with lone surrogates", "must be valid Unicode") from None


def is_number(value: object) -> bool:
    """Whether a value is an int or a float, NumPy's included, and not a bool."""
    return isinstance(value, Real) and not isinstance(value, bool)


def is_integer(value: object) -> bool:
    """Whether a value is an int, NumPy's included, and not a bool."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def plain_numbers(value: Any) -> Any:
    """Convert the numbers and arrays of NumPy and torch to Python's, also inside lists, tuples and dicts."""
    if type(value).__module__ in ("numpy", "torch") and hasattr(value, "tolist"):  # neither is imported here
        return value.tolist()
    if type(value) in (list, tuple):
        return type(value)(map(plain_numbers, value))
    if type(value) is dict:
        return {plain_numbers(key): plain_numbers(item) for key, item in value.items()}
    return value


def is_list(value: object) -> TypeGuard[list[Any] | tuple[Any, ...]]:
    """Whether a value is a list or a tuple, which hold one value for each row."""
    return isinstance(value, list | tuple)


def given_of(**values: Any) -> dict[str, Any]:
    """Return the keywords whose value is not None."""
    return {name: value for name, value in values.items() if value is not None}


def check_draft_tokens(value: int) -> int:
    """Raise InputError unless `value` is an integer from 1 to 512."""
    if not is_integer(value) or not 1 <= value <= MAX_DRAFT_TOKENS:
        raise InputError("num_draft_tokens", value, f"must be an integer from 1 to {MAX_DRAFT_TOKENS}")
    return value
