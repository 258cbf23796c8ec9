"""A JSON object in a text that grows: which characters belong to which member, and where it ends."""

from __future__ import annotations

import json
import re

__all__ = ["ObjectReader"]

BLANK = " \t\n\r"
SCALAR = re.compile(r"-?(0|[1-9]\d*)(\.\d+)?([eE][+-]?\d+)?|true|false|null", re.ASCII)
SCALAR_CHARACTERS = frozenset("+-.0123456789Eaeflnrstu")
VALUE = {"value", "value or ]"}
KEY = {"key", "key or }"}


class ObjectReader:
    """Reads one JSON object character by character, as strictly as `json.loads`.

    Attributes:
        key: last key of the object itself, not of the objects in it; None before the first.
        has_ended: whether the object is complete.
    """

    def __init__(self) -> None:
        self.key: str | None = None
        self.has_ended = False
        self._open: list[str] = []  # brackets
        self._state = "start"
        self._text = ""  # of the current scalar, or of a key of the object itself
        self._is_key = False  # whether the current string is a key
        self._digits = 0  # hexadecimal digits that the current escape still needs

    def add(self, character: str) -> bool:
        """Read a character; return whether it belongs to the value of `key`.

        Raises:
            ValueError: the text is not the beginning of a JSON object.
        """
        if self._state in ("string", "escape"):
            return self._add_to_string(character)
        if self._state == "scalar":
            if character in SCALAR_CHARACTERS:
                self._text += character
                return True
            if not SCALAR.fullmatch(self._text):
                raise ValueError(f"{self._text!r} is not a JSON value")
            self._state = "after"
        before = len(self._open)
        if character not in BLANK:
            self._add_token(character)
        is_value = self._state in ("string", "scalar") and not self._is_key
        return before > 1 or len(self._open) > 1 or is_value

    def _add_to_string(self, character: str) -> bool:
        if character < " ":
            raise ValueError("a control character in a JSON string")
        is_value = not self._is_key or len(self._open) > 1
        if not is_value:
            self._text += character
        if self._state == "escape":
            self._add_escaped(character)
        elif character == "\\":
            self._state, self._digits = "escape", 0
        elif character == '"':
            self._state = ":" if self._is_key else "after"
            if not is_value:
                self.key = json.loads(self._text)
        return is_value

    def _add_escaped(self, character: str) -> None:
        if self._digits:
            if character not in "0123456789abcdefABCDEF":
                raise ValueError("an escape in a JSON string needs four hexadecimal digits")
            self._digits -= 1
        elif character == "u":
            self._digits = 4
        elif character not in '"\\/bfnrt':
            raise ValueError(f"{character!r} cannot be escaped in a JSON string")
        if not self._digits:
            self._state = "string"

    def _add_token(self, character: str) -> None:
        """Read a character between strings and scalars that is not blank."""
        state, inside = self._state, self._open[-1] if self._open else ""
        if character == '"' and state in VALUE | KEY:
            self._state, self._is_key, self._text = "string", state in KEY, character
        elif (character == "{" and state in VALUE | {"start"}) or (character == "[" and state in VALUE):
            self._open.append(character)
            self._state = "key or }" if character == "{" else "value or ]"
        elif (inside + character == "{}" and state in ("key or }", "after")) or (
            inside + character == "[]" and state in ("value or ]", "after")
        ):
            self._open.pop()
            self._state = "after" if self._open else "end"
            self.has_ended = not self._open
        elif character == "," and state == "after":
            self._state = "key" if inside == "{" else "value"
        elif character == ":" and state == ":":
            self._state = "value"
        elif character in SCALAR_CHARACTERS and state in VALUE:
            self._state, self._text, self._is_key = "scalar", character, False
        else:
            raise ValueError(f"{character!r} cannot follow here in JSON")
