"""Rows of conversations: three equivalent formats, and errors of invalid rows."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from mmspec.errors import InputError
from mmspec.training.data.conversation_file import read_conversation, read_conversations
from mmspec.training.data.conversations import message

ASKED, SAID = "what is there ?", "a red circle"
REPLY = {"role": "assistant", "content": SAID}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def chat(content: Any, reply: Mapping[str, Any] = REPLY, **columns: Any) -> dict[str, Any]:
    return {"messages": [user(content), reply], **columns}


def told(asked: str, **columns: Any) -> dict[str, Any]:
    turns = [{"from": "human", "value": asked}, {"from": "gpt", "value": SAID}]
    return {"conversations": turns, **columns}


PROMPT = {"prompt": ASKED, "response": SAID}
LLAVA = told(f"<image>\n{ASKED}", id="1", image="a.png")
IN_PARTS = [{"type": "image", "path": "a.png"}, {"type": "text", "text": ASKED}]
ROWS: list[dict[str, Any]] = [
    {"image": "a.png", **PROMPT},
    LLAVA,
    chat(ASKED, image="a.png"),
    chat(IN_PARTS, {"role": "assistant", "content": [{"type": "text", "text": SAID}]}),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    return tmp_path


def test_all_forms_say_the_same(folder: Path) -> None:
    for row in ROWS:
        read = read_conversation(row, "row", folder)
        assert read.messages == (message("user", ASKED, 1), message("assistant", SAID))
        assert read.images == (folder / "a.png",)


def test_files_and_iterables_give_the_same(folder: Path) -> None:
    rows = ROWS
    (folder / "rows.jsonl").write_text("\n\n".join(map(json.dumps, rows)))
    (folder / "rows.json").write_text(json.dumps(rows))
    lines, table = read_conversations(folder / "rows.jsonl"), read_conversations(str(folder / "rows.json"))
    given = read_conversations(
        {**row, "image": Image.open(folder / "a.png")} for row in rows if "image" in row
    )
    assert lines == table and len(lines) == 4
    assert [each.messages for each in given] == [each.messages for each in lines[:3]]


def test_images_stand_where_they_are_placed(folder: Path) -> None:
    row = {
        "image": ["a.png", "b.png"],
        "conversations": [
            {"from": "system", "value": "be brief"},
            {"from": "human", "value": "see\n<image>\nand <image>?"},
            {"from": "gpt", "value": "yes"},
            {"from": "human", "value": "and now ?"},
            {"from": "gpt", "value": "no"},
            {"from": "human", "value": "thanks"},
        ],
    }
    read = read_conversation(row, "row", folder)
    assert [each["role"] for each in read.messages] == ["system", "user", "assistant", "user", "assistant"]
    parts = read.messages[1]["content"]
    assert [part.get("text", part["type"]) for part in parts] == ["see", "image", "and ", "image", "?"]
    assert read.images == (folder / "a.png", folder / "b.png")


WRONG: list[tuple[Any, str]] = [
    ([1], "allowed|image"),
    ({"image": "a.png", "prompt": ASKED}, "response"),
    ({"messages": [REPLY]}, "user message"),
    ({"messages": [{"role": "tool", "content": SAID}]}, "messages"),
    ({"conversations": "hello"}, "conversations"),
    ({**PROMPT, "image": "c.png"}, "path of an image file"),
    ({**PROMPT, "image": "https://x.y/a.png"}, "path of an image"),
    (told("<image>"), "one image for each"),
    ({**LLAVA, "image": ["a.png", "b.png"]}, "as many images as placeholders"),
    ({**PROMPT, "prompt": "a <image> of"}, "one image for each"),
    ({**PROMPT, "video": "a.mp4"}, "unknown column"),
    ({**PROMPT, "prompt": f"<video>\n{ASKED}"}, "placeholder '<video>'"),
    ({**PROMPT, "image": "a.png", "prompt": f"<|image_1|> {ASKED}"}, r"placeholder '<\|image_1\|>'"),
    (chat("<image>"), "one image for each"),
    ({**PROMPT, "image": "a.png", "response": "<image>"}, "user's turns"),
    ({**LLAVA, "tools": "[]"}, "unknown column 'tools'"),
    ({**LLAVA, "images": ["a.png"]}, "one of the columns"),
    ({**LLAVA, "prompt": ASKED}, "messages"),
    (
        {"system": "be brief", "messages": [{"role": "system", "content": "no"}, user(ASKED), REPLY]},
        "column or a system turn",
    ),
    (chat(ASKED, {**REPLY, "tool_calls": [{"name": "f"}]}), "a content only"),
    (chat([{"type": "image", "path": "a.png", "max_pixels": 9}]), "type 'image' or 'text'"),
    (
        chat([{"type": "image", "index": 1}, {"type": "image", "index": 0}], images=["a.png", "b.png"]),
        "order of their parts",
    ),
    (chat([{"type": "video"}]), "type 'image' or 'text'"),
]


def test_what_cannot_be_used_is_refused_by_its_line(folder: Path) -> None:
    for row, allowed in WRONG:
        (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, (LLAVA, row))))
        with pytest.raises(InputError) as caught:
            read_conversations(folder / "rows.jsonl", "<image>")
        assert caught.value.argument == "data, line 2" and re.search(allowed, str(caught.value)), row


def test_the_whole_file_is_checked_and_the_first_bad_rows_are_named(folder: Path) -> None:
    good, bad = LLAVA, {"prompt": ASKED}
    rows = [good, bad, good, {**good, "video": "a.mp4"}, bad, bad, bad]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError) as caught:
        read_conversations(folder / "rows.jsonl")
    said = str(caught.value)
    assert "5 rows that cannot be used" in said and "and 2 more" in said
    assert all(f"line {number} must" in said for number in (2, 4, 5)) and "line 6 " not in said


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_end_at_line_feeds_alone(mark: str, folder: Path) -> None:
    odd = "a\u2028b\u2029c\u0085d"
    lines = [json.dumps({"prompt": ASKED, "response": odd}, ensure_ascii=False), json.dumps(LLAVA)]
    for end in ("\n", "\r\n"):
        (folder / "rows.jsonl").write_bytes((mark + end.join([*lines, ""])).encode())
        read = read_conversations(folder / "rows.jsonl")
        assert len(read) == 2 and read[0].messages[1] == message("assistant", odd)
    (folder / "rows.json").write_bytes((mark + f"[{lines[0]}]").encode())
    assert len(read_conversations(folder / "rows.json")) == 1
