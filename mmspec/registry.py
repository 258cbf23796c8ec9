"""Names with options as users write them, and the nearest names for error messages."""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterable
from itertools import product
from typing import Any

from mmspec.errors import InputError


def did_you_mean(name: object, allowed: Iterable[object]) -> str:
    """Phrase for an error message: the nearest allowed name if there is one, then all of them."""
    names = sorted(map(str, allowed))
    near = difflib.get_close_matches(str(name), names, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return f"{hint}allowed: {', '.join(names)}"


def parse_options(argument: str, text: str) -> tuple[str, dict[str, Any]]:
    """Read `name[:option=value]...`; values are numbers, true, false, null, or else strings.

    `option.key=value` is an entry of an option that is a table.

    Raises:
        InputError: a part is no option with a value.
    """
    name, *parts = (part.strip() for part in text.strip().split(":"))
    options: dict[str, Any] = {}
    for part in parts:
        option, equals, value = part.partition("=")
        option, dot, key = option.strip().replace("-", "_").partition(".")
        if not option or not equals or bool(dot) != bool(key):
            raise InputError(argument, text, "options as name=value, separated by colons")
        table = options.setdefault(option, {}) if dot else options
        if not isinstance(table, dict):
            raise InputError(argument, text, f"either {option}=value or {option}.key=value")
        table[key or option] = _value(value.strip())
    return name, options


def _value(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return text


def alternatives(text: str) -> list[str]:
    """Write out a choice whose options have several values: `sjd:window=8|16` is two of them."""
    name, *parts = text.strip().split(":")
    options = [part.partition("=") for part in parts]
    written = [[f"{key}{sign}{one}" for one in value.split("|")] for key, sign, value in options]
    return [":".join([name, *chosen]) for chosen in product(*written)]
