"""Reading of text files: UTF-8, with or without a byte order mark, split into lines at line feeds alone.

`str.splitlines` also splits at U+2028, U+2029, U+0085 and others, which a JSON string may contain unescaped.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from mmspec.errors import InputError

__all__ = ["json_lines", "parse_json", "read_text"]


def read_text(file: Path, argument: str, rule: str = "must be a readable file of UTF-8 text") -> str:
    """Read a text file, without its byte order mark and with its line ends unchanged.

    Args:
        file: path of the file.
        argument: name of the argument in error messages.
        rule: rule in error messages, beginning with a verb.

    Raises:
        InputError: the file cannot be read or is not UTF-8; the message names the first bad line.
    """
    try:
        data = file.read_bytes()
    except OSError as error:
        raise InputError(argument, str(file), f"{rule} ({type(error).__name__})") from error
    refused = f"{rule} ({UnicodeDecodeError.__name__})"
    if data.startswith((codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)):
        raise InputError(argument, str(file), f"{refused}: {file.name} is UTF-16; save it as UTF-8")
    place, why = data.find(b"\0"), "a NUL byte, as in UTF-16"
    text = ""
    if place < 0:
        try:
            text = data.decode("utf-8-sig")
        except UnicodeDecodeError as error:
            # the decoder removes the byte order mark before it counts bytes
            place = error.start + len(data) - len(error.object)
            why = f"the byte 0x{data[place]:02x}, which is not UTF-8"
    if place >= 0:
        line = data.count(b"\n", 0, place) + 1
        raise InputError(argument, str(file), f"{refused}: line {line} of {file.name} has {why}")
    return text


def json_lines(
    text: str, where: Callable[[int], str], rule: str = "must be one JSON object per line"
) -> Iterator[tuple[str, Any]]:
    """Parse each line that is not empty, and yield its name and its value.

    Args:
        text: text of a JSONL file.
        where: function from a line number, counted from 1 with empty lines included, to a name for errors.
        rule: rule in error messages, beginning with a verb.

    Raises:
        InputError: a line is not JSON.
    """
    for number, line in enumerate(text.split("\n"), start=1):
        if line.strip():
            yield where(number), parse_json(line, where(number), rule)


def parse_json(text: str, where: str, rule: str) -> Any:
    """Parse a JSON value.

    Raises:
        InputError: the text is not JSON; the error has the given rule.
    """
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(where, text, rule) from error
