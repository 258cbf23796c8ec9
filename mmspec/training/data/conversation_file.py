"""Reader of conversation files: chat messages, prompt and response, or LLaVA's instruction format.

Everything but the images' contents is checked here, before anything else happens. Knows no model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mmspec.errors import InputError
from mmspec.training.data.conversations import Conversation, Message, message

__all__ = ["read_conversation", "read_conversations"]

PLACEHOLDER = "<image>"  # of the LLaVA instruction format
SPEAKERS = {"human": "user", "user": "user", "gpt": "assistant", "assistant": "assistant", "system": "system"}
FORMS = (
    '{"image": path or list of paths, "messages": chat messages}, {"image": path, "prompt": text, '
    '"response": text}, or {"image": path, "conversations": [{"from": "human" or "gpt", "value": text}]}'
)


def read_conversations(
    rows: str | Path | Iterable[Mapping[str, Any]], control: str | None = None
) -> list[Conversation]:
    """Read all conversations of a file, or of rows as they would be parsed from one.

    Args:
        rows: a JSONL file, a `.json` file that is a list, or an iterable; see `read_conversation`.
        control: see there.

    Raises:
        InputError: a file or a row that cannot be used; the message has its number.
    """
    if not isinstance(rows, str | Path):
        return [read_conversation(row, f"data[{index}]", Path(), control) for index, row in enumerate(rows)]
    file = Path(rows)
    allowed = f"a JSONL file, or a .json file that is a list, of rows {FORMS}"
    try:
        text = file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise InputError("data", str(file), allowed) from error
    if file.suffix != ".json":
        lines = {f"data, line {number}": line for number, line in enumerate(text.splitlines(), 1)}
        named = [(where, parsed(line, where, FORMS)) for where, line in lines.items() if line.strip()]
    else:
        table = parsed(text, "data", allowed)
        if not isinstance(table, list):
            raise InputError("data", str(file), allowed)
        named = [(f"data[{index}]", row) for index, row in enumerate(table)]
    return [read_conversation(row, where, file.parent, control) for where, row in named]


def parsed(text: str, where: str, allowed: str) -> Any:
    """Parse a JSON value."""
    try:
        return json.loads(text)
    except (ValueError, RecursionError) as error:
        raise InputError(where, text, allowed) from error


def read_conversation(row: Any, where: str, folder: Path, control: str | None = None) -> Conversation:
    """Read a row of any of the three forms: chat messages, prompt and response, LLaVA's instruction format.

    Images that no message places come first in the first message of the user's. Paths are those of files
    that are there; from Python, images may also be whatever `load_image` takes but addresses.

    Args:
        row: a table.
        where: its name in messages.
        folder: that its paths are relative to.
        control: the target's own placeholder, which may not stand in a text.

    Raises:
        InputError: it cannot be used.
    """
    if not isinstance(row, Mapping):
        raise InputError(where, row, FORMS)
    given = row.get("image", row.get("images"))
    images = [] if given is None else list(given) if isinstance(given, list | tuple) else [given]
    waiting, shown = iter(images), []
    messages: list[dict[str, Any]] = []
    for role, parts in read_messages(row, where):
        content: list[Message] = []
        for part in parts:
            kind = part.get("type") if isinstance(part, Mapping) else None
            if kind == "image":
                image = next(
                    (part[key] for key in ("image", "path", "url") if part.get(key) is not None), None
                )
                image = next(waiting, None) if image is None else image
                if image is None:
                    allowed = "one for each place that it has for them"
                    raise InputError(where, f"{len(images)} images", allowed)
                shown.append(image)
                content.append({"type": "image"})
            elif kind == "text" and isinstance(part.get("text"), str):
                if control and control in part["text"]:
                    allowed = f"text without {control!r}, which stands for an image"
                    raise InputError(where, part["text"], allowed)
                content.append({"type": "text", "text": part["text"]})
            else:
                raise InputError(where, part, "parts of type 'image' or 'text'")
        messages.append({"role": role, "content": content})
    left = list(waiting)
    if left and shown:
        allowed = f"as many as it has places for: {len(images) - len(left)}"
        raise InputError(where, f"{len(images)} images", allowed)
    first = next((index for index, each in enumerate(messages) if each["role"] == "user"), None)
    last = max((index for index, each in enumerate(messages) if each["role"] == "assistant"), default=-1)
    if first is None or last < first:
        raise InputError(where, row, "something that the user says, and a reply of the assistant's")
    messages[first]["content"] = [*message("", "", len(left))["content"][:-1], *messages[first]["content"]]
    conversation = Conversation(
        tuple(messages), tuple(located(image, where, folder) for image in left + shown)
    )
    return conversation.until(last + 1)


def read_messages(row: Mapping[str, Any], where: str) -> Iterable[tuple[str, Sequence[Any]]]:
    """The speaker and the content parts of each message in a row."""
    if "messages" in row:
        said = [(each.get("role"), each.get("content")) for each in tables(row["messages"], where)]
    elif "conversations" in row:
        said = [(each.get("from"), each.get("value")) for each in tables(row["conversations"], where)]
        said = [(role, placed(text) if isinstance(text, str) else None) for role, text in said]
    else:
        said = [("user", row.get("prompt")), ("assistant", row.get("response"))]
    for role, content in said:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        if role not in SPEAKERS or not isinstance(parts, list | tuple):
            raise InputError(where, row, FORMS)
        yield SPEAKERS[role], parts


def tables(value: Any, where: str) -> list[Mapping[str, Any]]:
    """Check that a value is a list of tables."""
    if not isinstance(value, list | tuple) or not all(isinstance(each, Mapping) for each in value):
        raise InputError(where, value, FORMS)
    return list(value)


def placed(text: str) -> list[Message]:
    """Split a text of the LLaVA format into parts, with images where its placeholders are."""
    pieces = [piece.strip("\n") for piece in text.split(PLACEHOLDER)]
    content = list(message("", pieces[0])["content"])
    for piece in pieces[1:]:
        content += message("", piece, 1)["content"]
    return [part for part in content if part != {"type": "text", "text": ""}]


def located(image: Any, where: str, folder: Path) -> Any:
    """The path of an image file that exists; an image that is one already is returned as it is.

    Raises:
        InputError: there is no such file.
    """
    if not isinstance(image, str | Path):
        return image
    path = folder / image
    if not path.is_file():
        raise InputError(where, str(image), "the path of an image, relative to the file")
    return path
