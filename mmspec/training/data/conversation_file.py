"""Parsing of conversation files: chat messages, prompt and response, or LLaVA's instruction format.

All rows are checked before training, except for the contents of images. The module does not depend on models.
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

PLACEHOLDER = "<image>"  # of the LLaVA instruction format and others
OTHERS = re.compile(  # placeholders of unsupported media and formats
    r"<video>|<audio>|<image_?\d+>|<\|(?:image|video|audio)(?:_\d+)?\|>|<ImageHere>|<image_placeholder>"
    r"|<img>[^<]*</img>"
)
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
FORMS = (
    'must be {"image": path or list of paths, "messages": chat messages}, {"image": path, "prompt": text, '
    '"response": text}, or {"image": path, "conversations": [{"from": "human" or "gpt", "value": text}]}, '
    'each with or without a "system" text'
)
KINDS = Image.Image | bytes | bytearray | memoryview | io.BytesIO
NO_IMAGES = "must contain text only: the target does not accept images"
Turn = tuple[str, list[Message]]
"""A role, and the parts of its message; image parts may contain their data."""


def read_conversations(
    rows: str | Path | Iterable[Mapping[str, object]],
    control: str | Sequence[str] | None = None,
    *,
    with_images: bool = True,
) -> list[Conversation]:
    """Read conversations from a JSON or JSONL file, or from an iterable of rows.

    Args:
        rows: a JSONL file, a `.json` file with a list, or an iterable of dicts; see `read_conversation`.
        control, with_images: see `read_conversation`.

    Raises:
        InputError: the file or some rows cannot be used; the message names the first of these rows.
    """
    folder, table = Path(), cast(Any, rows)
    named: Iterable[tuple[str, Any]] | None = None
    if isinstance(rows, str | Path):
        file = Path(rows)
        folder, rule = file.parent, f"must be a JSONL file, or a .json file with a list; each row {FORMS}"
        text = read_text(file, "data", rule)
        if file.suffix != ".json":
            named = json_lines(text, "data, line {}".format, FORMS)
        else:
            table = parse_json(text, "data", rule)
            if not isinstance(table, list):
                raise InputError("data", str(file), rule)
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
    """Parse a row in one of three formats: chat messages, prompt and response, LLaVA's instruction format.

    In all formats, `<image>` in a user message marks the position of an image. Images without a position are
    inserted at the start of the first user message. A `system` column becomes the first turn. Turns after the
    last reply are dropped. Images are paths of existing files; from Python, they may also be any input of
    `load_image` except URLs.

    Args:
        row: the row, a dict.
        where: name of the row in error messages.
        folder: folder that paths are relative to.
        control: placeholders of the target, which are not allowed in texts.
        with_images: False for a text-only target: images raise an error, and `<image>` is ordinary text.

    Raises:
        InputError: the row cannot be used, or has parts that would be ignored.
    """
    if not isinstance(row, Mapping):
        raise InputError(where, row, FORMS)
    given = [row[name] for name in ("image", "images") if is_given(row.get(name))]
    if len(given) > 1:
        raise InputError(where, "both", "must have one of the columns 'image' and 'images'")
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
                rule = "must contain images in the user's turns only"
                raise InputError(where, f"an image in a turn of the {role}", rule)
            else:
                image = next((part[key] for key in SOURCES if part.get(key) is not None), None)
                if image is None and not waiting:
                    rule = f"must have one image for each image part and each {PLACEHOLDER!r}"
                    raise InputError(where, f"{len(images)} images", rule)
                if image is None and part.get("index") not in (None, len(images) - len(waiting)):
                    raise InputError(where, part, "must list its images in the order of their parts")
                shown.append(waiting.pop(0) if image is None else image)
        content = [{"type": "image"} if part["type"] == "image" else part for part in parts]
        messages.append({"role": role, "content": content})
    if waiting and shown:
        rule = f"must have as many images as placeholders: {len(images) - len(waiting)}"
        raise InputError(where, f"{len(images)} images", rule)
    first = next((index for index, each in enumerate(messages) if each["role"] == "user"), None)
    last = max((index for index, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
    if first is None or last < first:
        raise InputError(where, row, "must contain a user message, followed by an assistant reply")
    messages[first]["content"] = [*message("", "", len(waiting))["content"][:-1], *messages[first]["content"]]
    found = tuple(located(image, where, folder) for image in waiting + shown)
    return Conversation(tuple(messages), found, where).until(last + 1)


SOURCES = ("image", "path", "url")  # keys of an image part that may contain its data
TURN = Keys(("role", "from", "content", "value"), {**TEMPLATE_KEYS, **UNSUPPORTED_KEYS})
IMAGE = replace(PARTS["image"], read=("type", *SOURCES, "index"))


def read_turns(row: Mapping[str, object], where: str, with_images: bool) -> Iterator[Turn]:
    """Yield the role and the content parts of each turn of a row."""
    forms = [form for form in ("messages", "conversations", "prompt") if row.get(form) is not None]
    if len(forms) != 1:
        raise InputError(where, row, FORMS)
    known = ("prompt", "response") if forms == ["prompt"] else forms
    check_columns(row, ("image", "images", "system", *known), where, FORMS)
    said: Any = row[forms[0]]
    if forms == ["prompt"]:
        pairs = (("user", said), ("assistant", row.get("response")))
        said = [{"role": role, "content": content} for role, content in pairs]
    if not isinstance(said, list | tuple) or not all(isinstance(each, Mapping) for each in said):
        raise InputError(where, said, FORMS)
    if is_given(row.get("system")):
        if any(SPEAKERS.get(str(speaker_of(each))) == "system" for each in said):
            raise InputError(where, "both", "must have either a 'system' column or a system turn")
        said = [{"role": "system", "content": row["system"]}, *said]
    for number, each in enumerate(said, start=1):
        speaker, content = speaker_of(each), each.get("content", each.get("value"))
        if not isinstance(speaker, str) or speaker not in SPEAKERS:
            rule = f"must have messages by one of {', '.join(SPEAKERS)}"
            raise InputError(where, f"turn {number} by {speaker!r}", rule)
        unread = TURN.unread({key: value for key, value in each.items() if is_given(value)})
        if unread is not None:
            rule = "must have turns with a role and a content only"
            raise InputError(where, f"turn {number} with {unread!r}", rule)
        if not isinstance(content, str | list | tuple):
            raise InputError(where, row, FORMS)
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        yield SPEAKERS[speaker], [piece for part in parts for piece in checked_part(part, where, with_images)]


def speaker_of(turn: Mapping[str, object]) -> Any:
    """The role of a turn, in chat messages or in LLaVA's format."""
    return turn.get("role", turn.get("from"))


def checked_part(part: Any, where: str, with_images: bool) -> list[Message]:
    """Check a part of a message, and split its text at image placeholders.

    Raises:
        InputError: the part is neither text nor image, or has unknown keys.
    """
    kind = part.get("type") if isinstance(part, Mapping) else None
    rule = "must have message parts of type 'image' or 'text' only, with known keys"
    is_text = kind == "text" and isinstance(part.get("text"), str)
    if not (is_text or kind == "image"):
        raise InputError(where, part, rule)
    unread = (PARTS["text"] if is_text else IMAGE).unread(part)
    if unread is not None:
        raise InputError(where, f"a part of type {kind!r} with {unread!r}", rule)
    return placed(part["text"]) if is_text and with_images else [part]


def check_text(text: str, controls: Iterable[str], where: str) -> None:
    """Check that a text has no other placeholders, which would be learnt as words or have no image.

    Raises:
        InputError: the text has one.
    """
    for token in (*controls, *OTHERS.findall(text)):
        if token in text:
            raise InputError(where, text, f"must not contain the placeholder {token!r} in a text")


def placed(text: str) -> list[Message]:
    """Split a text into text and image parts at its placeholders, without the line breaks around them."""
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
    """Return the path of an existing image file, or an image that is not a path unchanged.

    Raises:
        InputError: the file does not exist, or the value is not an image.
    """
    if not isinstance(image, str | Path):
        # the datasets library stores images as dicts
        held = isinstance(image, Mapping) and (image.get("bytes") or image.get("base64"))
        if held or isinstance(image, KINDS) or is_array(image):
            return image
        raise InputError(where, image, "must have images or paths of image files")
    path = folder / image
    if not path.is_file():
        raise InputError(where, str(image), "must have the path of an image file, relative to the data file")
    return path
