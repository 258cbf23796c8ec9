"""Incremental parser of tool calls: splits the text of an answer into content and calls."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import cast

from mmspec.open_types import Json
from mmspec.serving.parsing.json_object import ObjectReader
from mmspec.serving.parsing.tool_formats import TOOL_NAME, ToolFormat

__all__ = ["CallArguments", "CallEnd", "CallStart", "Content", "Piece", "ToolParser"]

ARGUMENTS = {"arguments", "parameters"}
MEMBERS = {"name", "id", "type", "index"} | ARGUMENTS
#: Types of JSON schemas that a value of Python has.
TYPE_OF = {
    str: {"string"}, bool: {"boolean"}, int: {"integer", "number"}, float: {"number"}, list: {"array"},
    dict: {"object"}, type(None): {"null"},
}  # fmt: skip
MOST_HEAD = 400  # characters between a mark and the JSON object


@dataclass(frozen=True)
class Content:
    """Text that belongs to no call."""

    text: str


@dataclass(frozen=True)
class CallStart:
    """The beginning of a call."""

    name: str


@dataclass(frozen=True)
class CallArguments:
    """A part of the JSON text of the arguments of the current call."""

    text: str


@dataclass(frozen=True)
class CallEnd:
    """The end of a call.

    Attributes:
        is_valid: whether the call is complete and well-formed.
        source: whole text of the call, marks included.
        unsent: end of `source` after the last `CallArguments`.
    """

    is_valid: bool
    source: str
    unsent: str


Piece = Content | CallStart | CallArguments | CallEnd


class CallReader:
    """Reads one call, after its mark, character by character.

    Attributes:
        is_complete: whether the JSON object is complete.
        is_done: whether the whole call is.
        has_started: whether the name and the first character of the arguments are known.
    """

    def __init__(self, form: ToolFormat, names: Collection[str] | None) -> None:
        """Start a call whose name has to be one of `names`, if they are given."""
        self.is_complete = self.is_done = self.has_started = False
        self.text = ""
        self.sent = 0  # length of the text up to the end of the last `CallArguments`
        self._form, self._names = form, names
        self._object: ObjectReader | None = None
        self._name: str | None = None
        self._in_head = False  # whether the name is in the head
        self._values: dict[str, str] = {}
        self._key: str | None = None  # of the value that is being read
        self._tail = ""

    def add(self, character: str) -> list[Piece]:
        """Read a character.

        Raises:
            ValueError: the text is not a call; the character was not read.
        """
        if self.is_complete:
            self._add_to_tail(character)
            found: list[Piece] = []
        elif self._object is None and character != "{":
            if len(self.text) == MOST_HEAD:
                raise ValueError("no JSON object follows the mark")
            found = []
        else:
            found = self._add_to_object(character)
        self.text += character
        if any(isinstance(piece, CallArguments) for piece in found):
            self.sent = len(self.text)
        return found

    def _add_to_object(self, character: str) -> list[Piece]:
        if self._object is None:
            head = re.fullmatch(self._form.head, self.text, re.ASCII)
            if head is None:
                raise ValueError("the head is not one of this format")
            self._object = ObjectReader()
            self._name = head.groupdict().get("name")
            self._in_head = self._name is not None
        is_value = self._object.add(character)
        found: list[Piece] = []
        if self._in_head:
            found = self._start() if not self.has_started else []
            found.append(CallArguments(character))
        elif is_value:
            found = self._add_to_member(str(self._object.key), character)
        elif self._key is not None:
            found = self._end_member()
        if self._object.has_ended:
            if not self.has_started:
                raise ValueError("the object has no name or no arguments")
            self.is_complete = True
            self.is_done = "" in self._form.tails
        return found

    def _add_to_member(self, key: str, character: str) -> list[Piece]:
        if self._key is None:
            given = ARGUMENTS & self._values.keys()
            if key not in MEMBERS or key in self._values or (key in ARGUMENTS and given):
                raise ValueError(f"{key!r} is not a member of a call, or occurs twice")
            if key in ARGUMENTS and character != "{":
                raise ValueError("the arguments are not an object")
            self._key, self._values[key] = key, ""
        self._values[key] += character
        if key not in ARGUMENTS or self._name is None:
            return []
        return [CallArguments(character)] if self.has_started else self._start(self._values[key])

    def _end_member(self) -> list[Piece]:
        ended, self._key = self._key, None
        if ended != "name":
            return []
        self._name = json.loads(self._values["name"])
        if not isinstance(self._name, str) or not re.fullmatch(TOOL_NAME, self._name):
            raise ValueError("the name is not the name of a tool")
        arguments = next((self._values[key] for key in ARGUMENTS if key in self._values), "")
        return self._start(arguments) if arguments else []

    def _start(self, arguments: str = "") -> list[Piece]:
        """Return the beginning of the call, with the arguments that are known."""
        name = str(self._name)
        if self._names is not None and name not in self._names:
            raise ValueError("the name is not one of the tools")
        self.has_started = True
        return [CallStart(name), *([CallArguments(arguments)] if arguments else [])]

    def _add_to_tail(self, character: str) -> None:
        if character.isspace():
            return
        tail = self._tail + character
        if not any(one.startswith(tail) for one in self._form.tails):
            raise ValueError("the tail is not one of this format")
        self._tail = tail
        self.is_done = tail in self._form.tails


class ElementsReader:
    """Reads one call whose arguments are XML elements, after its mark; the same interface as `CallReader`.

    The call is `<function=name><parameter=key>value</parameter>...</function></tool_call>`. Its arguments
    become JSON: values are text, unless the schema of the tool says otherwise.
    """

    def __init__(self, form: ToolFormat, schemas: Mapping[str, Json]) -> None:
        self.is_complete = self.is_done = self.has_started = False
        self.text = ""
        self.sent = 0
        self._form, self._schemas = form, schemas
        self._name = ""
        self._key: str | None = None  # of the value that is being read
        self._keys: set[str] = set()
        self._part = ""  # text since the last element

    def add(self, character: str) -> list[Piece]:
        """Read a character.

        Raises:
            ValueError: the text is not a call; the character was not read.
        """
        part = self._part + character
        if self._key is None:
            part = part.lstrip()
        found = self._end_part(part)
        self._part = "" if found is not None else part
        self.text += character
        if found:
            self.sent = len(self.text)
        return found or []

    def _end_part(self, part: str) -> list[Piece] | None:
        """Return the pieces of a part that is complete; None if it goes on."""
        if self._key is not None:
            if not part.endswith("</parameter>"):
                return None
            value = part.removesuffix("</parameter>").removeprefix("\n").removesuffix("\n")
            schema = (self._schemas.get(self._name) or {}).get("properties") or {}
            member = {self._key: typed(value, schema.get(self._key))}
            text = json.dumps(member, ensure_ascii=False)[1:-1]
            comma = ", " if len(self._keys) > 1 else ""
            self._key = None
            return [CallArguments(comma + text)]
        if self.is_complete:
            known = self._form.tails
        else:
            known = ("<parameter=", "</function>") if self.has_started else ("<function=",)
        if not any(one.startswith(part[: len(one)]) for one in known):
            raise ValueError("the text is no element of a call")
        if part in self._form.tails:
            self.is_done = True
            return []
        if part == "</function>":
            self.is_complete = True
            return [CallArguments("}")]
        opened = re.fullmatch(r"<(function|parameter)=([^>\n]*)>", part)
        if opened is None:
            if len(part) > MOST_HEAD:
                raise ValueError("the name is too long")
            return None
        name = opened[2]
        if opened[1] == "parameter":
            if not name or name in self._keys:
                raise ValueError("a parameter has no name, or occurs twice")
            self._key = name
            self._keys.add(name)
            return []
        if not re.fullmatch(TOOL_NAME, name):
            raise ValueError("the name is not the name of a tool")
        self._name, self.has_started = name, True
        return [CallStart(name), CallArguments("{")]


def typed(text: str, schema: object) -> object:
    """Return the value of a text by its schema; the text itself where the value has to be a string."""
    types = types_of(schema)
    if not types - {"string"}:
        return text
    try:
        value = json.loads(text.lower() if text in ("True", "False") else text)
        json.dumps(value, allow_nan=False)
    except (ValueError, RecursionError):
        return text
    return text if "string" in types and TYPE_OF[type(value)].isdisjoint(types) else value


def types_of(schema: object) -> set[str]:
    """Return the types that a schema names, those of its alternatives included."""
    if not isinstance(schema, dict):
        return set()
    given = schema.get("type", [])
    alternatives = [one for key in ("anyOf", "oneOf") for one in schema.get(key) or ()]
    return {*([given] if isinstance(given, str) else given)}.union(*map(types_of, alternatives))


class ToolParser:
    """Splits a text that grows into pieces, which do not depend on how the text is cut, once joined.

    A call that turns out not to be one before its name and the beginning of its arguments are known becomes
    content. A later one ends with `is_valid=False`, and the text after it is read as usual. Blanks around
    calls belong to no piece.

    Args:
        form: format of the calls.
        tools: schemas of the parameters of each tool. Calls without a mark have one of these names, since
            JSON may also be the answer itself.
    """

    def __init__(self, form: ToolFormat, tools: Mapping[str, Json] | None = None) -> None:
        self._form, self._tools = form, tools or {}
        self._held = ""  # text that is not read yet
        self._blank = ""  # blanks that may stand before a call
        self._call: CallReader | ElementsReader | None = None
        self._mark = ""  # of the current call, with the blanks before it; or a separator after a call
        self._may_open = form.is_bare  # whether a call without a mark may begin
        self._follows = False  # whether nothing but blanks has followed a call
        self._has_called = False

    def add(self, text: str) -> list[Piece]:
        """Add text; return the pieces that it completes."""
        pieces: list[Piece] = []
        self._held += text
        while self._held and (self._call is not None or self._find_call(pieces)):
            self._read_call(pieces)
        return joined(pieces)

    def finish(self) -> list[Piece]:
        """Return the pieces at the end of the text. A call whose tail alone is missing is valid."""
        pieces: list[Piece] = []
        while self._call is not None:
            if self._call.is_complete:
                self._end_call(pieces, True)
            else:
                self._abandon(pieces)
                pieces += self.add("")
        self._say(pieces, self._mark + self._held)
        if self._blank and not self._has_called:
            pieces.append(Content(self._blank))
        self._mark = self._held = self._blank = ""
        return joined(pieces)

    def _find_call(self, pieces: list[Piece]) -> bool:
        """Read content up to the next call; return whether there is one."""
        while self._follows or self._may_open:
            text = self._held.lstrip()
            if not text or self._is_closing(text):
                return False
            blank = self._held[: len(self._held) - len(text)]
            closer = next((one for one in self._form.closers if self._follows and text.startswith(one)), None)
            if closer is not None:
                self._held = text.removeprefix(closer)
            elif self._follows and self._form.separator and text[0] == self._form.separator:
                self._mark, self._held = blank + text[0], text[1:]
                self._follows, self._may_open = False, True
            elif self._may_open and text[0] == "{":
                self._mark, self._held = self._mark + blank, text
                self._call = CallReader(self._form, self._tools)
                return True
            else:
                self._held, self._mark = self._mark + self._held, ""
                self._follows = self._may_open = False
        marks = self._form.marks
        found = [(place, mark) for mark in marks if (place := self._held.find(mark)) >= 0]
        if not found:
            kept = max(overlap(self._held, mark) for mark in marks)
            self._say(pieces, self._held[: len(self._held) - kept])
            self._held = self._held[len(self._held) - kept :]
            return False
        place, mark = min(found)
        self._say(pieces, self._held[:place])
        self._mark, self._blank = self._blank + mark, ""
        self._held = self._held[place + len(mark) :]
        is_xml = self._form.is_xml
        self._call = ElementsReader(self._form, self._tools) if is_xml else CallReader(self._form, None)
        return True

    def _is_closing(self, text: str) -> bool:
        """Whether a text after a call may be the beginning of a closer."""
        return self._follows and any(one.startswith(text) and one != text for one in self._form.closers)

    def _read_call(self, pieces: list[Piece]) -> None:
        """Read the current call as far as the text goes."""
        call, held = cast(CallReader | ElementsReader, self._call), self._held
        for place, character in enumerate(held):
            try:
                pieces += call.add(character)
            except ValueError:
                self._held = held[place:]
                self._abandon(pieces)
                return
            if call.is_done:
                self._held = held[place + 1 :]
                self._end_call(pieces, True)
                return
        self._held = ""

    def _end_call(self, pieces: list[Piece], is_valid: bool) -> None:
        call = cast(CallReader | ElementsReader, self._call)
        pieces.append(CallEnd(is_valid, self._mark + call.text, call.text[call.sent :]))
        self._call, self._mark = None, ""
        self._follows, self._has_called = is_valid, True
        self._may_open = is_valid and self._form.is_bare

    def _abandon(self, pieces: list[Piece]) -> None:
        """End a call that is not well-formed; before its beginning is known, read its text as content."""
        call = cast(CallReader | ElementsReader, self._call)
        if call.has_started:
            self._end_call(pieces, False)
            return
        self._may_open = False
        self._say(pieces, self._mark)
        self._call, self._mark, self._held = None, "", call.text + self._held

    def _say(self, pieces: list[Piece], text: str) -> None:
        text = self._blank + text
        said = text.rstrip()
        self._blank = text[len(said) :]
        if said:
            pieces.append(Content(said))


def overlap(text: str, mark: str) -> int:
    """Return the length of the longest end of a text that is a beginning of a mark, and not all of it."""
    longest = min(len(text), len(mark) - 1)
    return next((length for length in range(longest, 0, -1) if text.endswith(mark[:length])), 0)


def joined(pieces: Iterable[Piece]) -> list[Piece]:
    """Join neighbouring pieces of content, and of arguments."""
    result: list[Piece] = []
    for piece in pieces:
        last = result[-1] if result else None
        if isinstance(piece, Content) and isinstance(last, Content):
            result[-1] = Content(last.text + piece.text)
        elif isinstance(piece, CallArguments) and isinstance(last, CallArguments):
            result[-1] = CallArguments(last.text + piece.text)
        else:
            result.append(piece)
    return result
