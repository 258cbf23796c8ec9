"""Text files of users as lines: UTF-8, with or without a byte order mark, ended by line feeds alone.

`str.splitlines` also splits at U+2028, U+2029, U+0085 and others, which may stand raw in a JSON string.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmspec.errors import InputError

__all__ = ["json_lines", "parse_json", "read_text"]


def read_text(file: Path, argument: str, allowed: str = "a readable file of UTF-8 text") -> str:
    """Read a text file, without its byte order mark and with its line ends as they are.

    Args:
        file: of the user's.
        argument: that errors name.
        allowed: what errors ask for.

    Raises:
        InputError: it cannot be read, or is no UTF-8: UTF-16, or a line with other bytes, which is named.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(argument, str(file), f"{allowed} ({type(error).__name__})") from error
    refused = f"{allowed} ({UnicodeDecodeError.__name__})"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(argument, str(file), f"{refused}: {file.name} is UTF-16; save it as UTF-8")
    place, why = data.find(b"\0"), "a NUL, as UTF-16 has"
    text = ""
    if place < 0:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            # the mark is cut off before bytes are counted
            place = error.start + len(data) - len(error.object)
            why = f"the byte 0x{data[place]:02x}, which is no UTF-8"
    if place >= 0:
        line = data.count(b"\n", 0, place) + 1
        raise InputError(argument, str(file), f"{refused}: line {line} of {file.name} has {why}")
    return text


def json_lines(
    text: str, where: Callable[[int], str], allowed: str = "one JSON object a line"
) -> Iterator[tuple[str, Any]]:
    """Parse each line that is not empty; yields its name and its value.

    Args:
        text: of a file.
        where: names a line by its number, which counts from 1 and counts empty ones too.
        allowed: what errors ask for.

    Raises:
        InputError: a line is no JSON.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield where(number), parse_json(line, where(number), allowed)


def parse_json(text: str, where: str, allowed: str) -> Any:
    """Parse a JSON value.

    Raises:
        InputError: it is none.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(where, text, allowed) from error
