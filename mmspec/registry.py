"""Registry of plug-ins by name, which are imported when asked for; how names are written with options.

Knows nothing of what the plug-ins do.
"""

from __future__ import annotations

import difflib
import importlib
import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, Generic, TypeVar

from mmspec.errors import InputError

T = TypeVar("T")


class Registry(Generic[T]):
    """A table `name -> "module:attribute"` whose entries are imported when asked for."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries = entries

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def __contains__(self, name: object) -> bool:
        return name in self._entries

    def __getitem__(self, name: str) -> T:
        """Import and return a plug-in.

        Raises:
            InputError: no such name; the message holds the nearest ones and all that exist.
        """
        if not isinstance(name, str) or name not in self._entries:
            raise InputError(self.kind, name, did_you_mean(name, self._entries))
        module, attribute = self._entries[name].split(":")
        plugin: T = getattr(importlib.import_module(module), attribute)
        return plugin


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
