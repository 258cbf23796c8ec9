"""Parsing of names with options ("copy:min_match=3"), and suggestions for misspelt names."""

from __future__ import annotations

import difflib
import json
from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

from mmspec.errors import InputError


def did_you_mean(name: object, allowed: Iterable[object]) -> str:
    """Return the rule of an InputError for an unknown name: all allowed names, and the nearest one."""
    names = sorted(map(str, allowed))
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f" (did you mean {near[0]!r}?)" if near else ""
    return f"must be one of {', '.join(names)}{hint}"


def require_known(argument: str, value: object, known: Collection[object]) -> None:
    """Raise InputError, which names the nearest known value, unless a value is known."""
    if value not in known:
        raise InputError(argument, value, did_you_mean(value, known))


def parse_options(argument: str, text: str) -> tuple[str, dict[str, Any]]:
    """Parse `name[:option=value]...`. A value is a JSON value (number, true, false, null) or a string.

    `option.key=value` sets one entry of an option that is a table.

    Raises:
        InputError: a part does not have the form `option=value`.
    """
    name, *parts = (part.strip() for part in text.strip().split(":"))
    options: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        option, dot, key = option.strip().replace("-", "_").partition(".")
        if not option or not equals or bool(dot) != bool(key):
            raise InputError(argument, text, "must list its options as name=value, separated by colons")
        table = options.setdefault(option, {}) if dot else options
        if not isinstance(table, dict):
            raise InputError(argument, text, f"must set either {option}=value or {option}.key=value")
        table[key or option] = _value(value.strip())
    return name, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def alternatives(text: str) -> list[str]:
    """Expand options with several values: `sjd:window=8|16` becomes `sjd:window=8` and `sjd:window=16`."""
    name, *parts = text.strip().split(":")
    options = [part.partition("=") for part in parts]
    written = [[f"{key}{sign}{one}" for one in value.split("|")] for key, sign, value in options]
    return [":".join([name, *chosen]) for chosen in product(*written)]
