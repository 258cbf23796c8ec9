"""Reader of conversation files: chat messages, prompt and response, or LLaVA's instruction format.

Everything but the images' contents is checked here, before anything else happens. Knows no model.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

from PIL import Image

from mmspec.errors import InputError
from mmspec.media.pixels import is_array
from mmspec.messages import PARTS, TEMPLATE_KEYS, UNSUPPORTED_KEYS, Keys
from mmspec.open_types import Json, Keywords
from mmspec.text_file import json_lines, parse_json, read_text
from mmspec.training.data.conversations import Conversation, Message, message
from mmspec.training.data.rows import check_columns, is_given, read_all

__all__ = ["read_conversation", "read_conversations"]

PLACEHOLDER = "<image>"  # of the LLaVA instruction format, which others share
OTHERS = re.compile(  # of media that nothing reads, and of other formats
    r"<video>|<audio>|<image_?\d+>|<\|(?:image|video|audio)(?:_\d+)?\|>|<ImageHere>|<image_placeholder>"
    r"|<img>[^<]*</img>"
)
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
FORMS = (
    '{"image": path or list of paths, "messages": chat messages}, {"image": path, "prompt": text, '
    '"response": text}, or {"image": path, "conversations": [{"from": "human" or "gpt", "value": text}]}, '
    'each with a "system" text or without'
)
KINDS = Image.Image | bytes | bytearray | memoryview | io.BytesIO
NO_IMAGES = "nothing but text: the target sees no images"
Turn = tuple[str, list[Message]]
"""A role, and the parts of its message; images may hold their data."""


def read_conversations(
    rows: str | Path | Iterable[Mapping[str, object]],
    control: str | Sequence[str] | None = None,
    *,
    with_images: bool = True,
) -> list[Conversation]:
    """Read all conversations of a file, or of rows as they would be parsed from one.

    Args:
        rows: a JSONL file, a `.json` file that is a list, or an iterable; see `read_conversation`.
        control, with_images: see there.

    Raises:
        InputError: a file or rows that cannot be used; the message has the first few of them by number.
    """
    folder, table = Path(), cast(Any, rows)
    named: Iterable[tuple[str, Any]] | None = None
    if isinstance(rows, str | Path):
        file = Path(rows)
        folder, allowed = file.parent, f"a JSONL file, or a .json file that is a list, of rows {FORMS}"
        text = read_text(file, "data", allowed)
        if file.suffix != ".json":
            named = json_lines(text, "data, line {}".format, FORMS)
        else:
            table = parse_json(text, "data", allowed)
            if not isinstance(table, list):
                raise InputError("data", str(file), allowed)
    named = named or ((f"data[{index}]", row) for index, row in enumerate(table))
    how: Keywords = {"control": control, "with_images": with_images}
    return read_all(named, lambda row, where: read_conversation(row, where, folder, **how))


def read_conversation(
    row: object,
    where: str,
    folder: Path,
    control: str | Sequence[str] | None = None,
    *,
    with_images: bool = True,
) -> Conversation:
    """Read a row of any of the three forms: chat messages, prompt and response, LLaVA's instruction format.

    `<image>` in what the user says is a place for an image, in all forms. Images that no message places come
    first in the first message of the user's. A `system` column is a turn in front of all others. What is said
    after the last reply is left out, for nothing can be learnt from it. Paths are those of files that are
    there; from Python, images may also be whatever `load_image` takes but addresses.

    Args:
        row: a table.
        where: its name in messages.
        folder: that its paths are relative to.
        control: the target's own placeholders, which may not stand in a text.
        with_images: False for a target of text alone: an image is refused, `<image>` is text as any other.

    Raises:
        InputError: it cannot be used, or something in it would not be.
    """
    if not isinstance(row, Mapping):
        raise InputError(where, row, FORMS)
    given = [row[name] for name in ("image", "images") if is_given(row.get(name))]
    if len(given) > 1:
        raise InputError(where, "both 'image' and 'images'", "one of the two columns")
    if given and not with_images:
        raise InputError(where, given[0], NO_IMAGES)
    images = [] if not given else list(given[0]) if isinstance(given[0], list | tuple) else given
    waiting, shown = list(images), []
    controls = [control] if isinstance(control, str) else control or []
    messages: list[Json] = []
    for role, parts in read_turns(row, where, with_images):
        for part in parts:
            if part["type"] == "text":
                if with_images:
                    check_text(part["text"], controls, where)
            elif not with_images:
                raise InputError(where, part, NO_IMAGES)
            elif role != "user":
                raise InputError(where, f"an image in what the {role} says", "images in the user's turns")
            else:
                image = next((part[key] for key in SOURCES if part.get(key) is not None), None)
                if image is None and not waiting:
                    allowed = f"one for each place that it has: each {PLACEHOLDER!r} stands for an image"
                    raise InputError(where, f"{len(images)} images", allowed)
                if image is None and part.get("index") not in (None, len(images) - len(waiting)):
                    raise InputError(where, part, "images in the order of their places")
                shown.append(waiting.pop(0) if image is None else image)
        content = [{"type": "image"} if part["type"] == "image" else part for part in parts]
        messages.append({"role": role, "content": content})
    if waiting and shown:
        allowed = f"as many as it has places for: {len(images) - len(waiting)}"
        raise InputError(where, f"{len(images)} images", allowed)
    first = next((index for index, each in enumerate(messages) if each["role"] == "user"), None)
    last = max((index for index, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
    if first is None or last < first:
        raise InputError(where, row, "something that the user says, and a reply of the assistant's")
    messages[first]["content"] = [*message("", "", len(waiting))["content"][:-1], *messages[first]["content"]]
    found = tuple(located(image, where, folder) for image in waiting + shown)
    return Conversation(tuple(messages), found, where).until(last + 1)


SOURCES = ("image", "path", "url")  # keys of an image part that may hold its data
TURN = Keys(("role", "from", "content", "value"), {**TEMPLATE_KEYS, **UNSUPPORTED_KEYS})
IMAGE = replace(PARTS["image"], read=("type", *SOURCES, "index"))


def read_turns(row: Mapping[str, object], where: str, with_images: bool) -> Iterator[Turn]:
    """The speaker and the content parts of each turn in a row."""
    forms = [form for form in ("messages", "conversations", "prompt") if row.get(form) is not None]
    if len(forms) != 1:
        raise InputError(where, row, FORMS)
    known = ("prompt", "response") if forms == ["prompt"] else forms
    check_columns(row, ("image", "images", "system", *known), where, f"rows {FORMS}")
    said: Any = row[forms[0]]
    if forms == ["prompt"]:
        pairs = (("user", said), ("assistant", row.get("response")))
        said = [{"role": role, "content": content} for role, content in pairs]
    if not isinstance(said, list | tuple) or not all(isinstance(each, Mapping) for each in said):
        raise InputError(where, said, FORMS)
    if is_given(row.get("system")):
        if any(SPEAKERS.get(str(speaker_of(each))) == "system" for each in said):
            raise InputError(where, "a 'system' column and a system turn", "one of the two")
        said = [{"role": "system", "content": row["system"]}, *said]
    for number, each in enumerate(said, start=1):
        speaker, content = speaker_of(each), each.get("content", each.get("value"))
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            allowed = f"messages of one of {', '.join(SPEAKERS)}"
            raise InputError(where, f"turn {number} of the speaker {speaker!r}", allowed)
        unread = TURN.unread({key: value for key, value in each.items() if is_given(value)})
        if unread is not None:
            raise InputError(where, f"turn {number} with {unread!r}", "a speaker and what it says, no more")
        if not isinstance(content, str | list | tuple):
            raise InputError(where, row, FORMS)
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield SPEAKERS[speaker], [piece for part in parts for piece in checked_part(part, where, with_images)]


def speaker_of(turn: Mapping[str, object]) -> Any:
    """Who speaks in a turn, in chat messages or in LLaVA's format."""
    return turn.get("role", turn.get("from"))


def checked_part(part: Any, where: str, with_images: bool) -> list[Message]:
    """The part of a message, split where images are placed in its text, if there can be any.

    Raises:
        InputError: it is neither a text nor an image, or has keys that are not read.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    is_text = kind == "text" and isinstance(part.get("text"), str)
    if not (is_text or kind == "image"):
        raise InputError(where, part, "parts of type 'image' or 'text'")
    unread = (PARTS["text"] if is_text else IMAGE).unread(part)
    if unread is not None:
        raise InputError(where, f"a part of type {kind!r} with {unread!r}", "parts of type 'image' or 'text'")
    return placed(part["text"]) if is_text and with_images else [part]


def check_text(text: str, controls: Iterable[str], where: str) -> None:
    """Refuse a text with a placeholder in it, which would be learnt as words or stand for nothing.

    Raises:
        InputError: it has one.
    """
    for token in (*controls, *OTHERS.findall(text)):
        if token in text:
            raise InputError(where, text, f"text without {token!r}, which stands for an image or the like")


def placed(text: str) -> list[Message]:
    """Split a text into parts, with images where its placeholders are; line breaks around these go."""
    pieces = text.split(PLACEHOLDER)
    if len(pieces) == 1:
        return [{"type": "text", "text": text}]
    content: list[Message] = []
    for index, piece in enumerate(pieces):
        piece = piece.lstrip("\n") if index else piece
        piece = piece.rstrip("\n") if index + 1 < len(pieces) else piece
        content += [{"type": "image"}] if index else []
        content += [{"type": "text", "text": piece}] if piece else []
    return content


def located(image: object, where: str, folder: Path) -> Any:
    """The path of an image file that exists; an image that is one already is returned as it is.

    Raises:
        InputError: there is no such file, or it is no image.
    """
    if not isinstance(image, str | Path):
        held = isinstance(image, Mapping) and (image.get("bytes") or image.get("base64"))  # as of datasets
        if held or isinstance(image, KINDS) or is_array(image):
            return image
        raise InputError(where, image, "the path of an image, or an image")
    path = folder / image
    if not path.is_file():
        raise InputError(where, str(image), "the path of an image, relative to the file")
    return path
