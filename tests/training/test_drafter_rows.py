"""Rows of conversations: three forms that say the same, and what is wrong with those that cannot be used."""

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
ROWS: Mapping[str, dict[str, Any]] = {
    "prompt and response": {"image": "a.png", "prompt": ASKED, "response": SAID},
    "llava": {
        "id": "1",
        "image": "a.png",
        "conversations": [
            {"from": "human", "value": f"<image>\n{ASKED}"},
            {"from": "gpt", "value": SAID},
        ],
    },
    "messages": {
        "image": "a.png",
        "messages": [{"role": "user", "content": ASKED}, {"role": "assistant", "content": SAID}],
    },
    "messages in parts": {
        "messages": [
            {
                "role": "user",
                "content": [{"type": "image", "path": "a.png"}, {"type": "text", "text": ASKED}],
            },
            {"role": "assistant", "content": [{"type": "text", "text": SAID}]},
        ],
    },
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("a.png", "b.png"):
        Image.new("RGB", (8, 8)).save(tmp_path / name)
    return tmp_path


def test_all_forms_say_the_same(folder: Path) -> None:
    for row in ROWS.values():
        read = read_conversation(row, "row", folder)
        assert read.messages == (message("user", ASKED, 1), message("assistant", SAID))
        assert read.images == (folder / "a.png",)


def test_files_and_iterables_give_the_same(folder: Path) -> None:
    rows = list(ROWS.values())
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


WRONG: Mapping[str, tuple[Any, str]] = {
    "no table": ([1], "allowed|image"),
    "no reply": ({"image": "a.png", "prompt": ASKED}, "response"),
    "a reply before a question": ({"messages": [{"role": "assistant", "content": SAID}]}, "user says"),
    "an unknown speaker": ({"messages": [{"role": "tool", "content": SAID}]}, "messages"),
    "no list": ({"conversations": "hello"}, "conversations"),
    "no image there": ({"image": "c.png", "prompt": ASKED, "response": SAID}, "path of an image"),
    "an address": ({"image": "https://x.y/a.png", "prompt": ASKED, "response": SAID}, "path of an image"),
    "more places than images": (
        {"conversations": [{"from": "human", "value": "<image>"}, {"from": "gpt", "value": SAID}]},
        "one for each place",
    ),
    "more images than places": ({**ROWS["llava"], "image": ["a.png", "b.png"]}, "as many as it has places"),
    "the placeholder in a text": ({"prompt": "a <image> of", "response": SAID}, "stands for an image"),
    "a video": ({"video": "a.mp4", "prompt": ASKED, "response": SAID}, "rows"),
    "a placeholder of a video": ({"prompt": f"<video>\n{ASKED}", "response": SAID}, "without '<video>'"),
    "a placeholder of another format": (
        {"image": "a.png", "prompt": f"<|image_1|> {ASKED}", "response": SAID},
        r"without '<\|image_1\|>'",
    ),
    "more places in messages than images": (
        {"messages": [{"role": "user", "content": "<image>"}, {"role": "assistant", "content": SAID}]},
        "one for each place",
    ),
    "an image in a reply": ({"image": "a.png", "prompt": ASKED, "response": "<image>"}, "user's turns"),
    "a column that nothing reads": ({**ROWS["llava"], "tools": "[]"}, "'tools'|rows"),
    "two columns of images": ({**ROWS["llava"], "images": ["a.png"]}, "one of the two"),
    "two forms": ({**ROWS["llava"], "prompt": ASKED}, "messages"),
    "a system column and a system turn": (
        {
            "system": "be brief",
            "messages": [
                {"role": "system", "content": "be brief"},
                {"role": "user", "content": ASKED},
                {"role": "assistant", "content": SAID},
            ],
        },
        "one of the two",
    ),
    "a call of a tool": (
        {
            "messages": [
                {"role": "user", "content": ASKED},
                {"role": "assistant", "content": SAID, "tool_calls": [{"name": "f"}]},
            ]
        },
        "no more",
    ),
    "a part with what is not read": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "path": "a.png", "max_pixels": 9}]},
                {"role": "assistant", "content": SAID},
            ]
        },
        "type 'image' or 'text'",
    ),
    "images in another order": (
        {
            "images": ["a.png", "b.png"],
            "messages": [
                {"role": "user", "content": [{"type": "image", "index": 1}, {"type": "image", "index": 0}]},
                {"role": "assistant", "content": SAID},
            ],
        },
        "order of their places",
    ),
    "a part of another type": (
        {
            "messages": [
                {"role": "user", "content": [{"type": "video"}]},
                {"role": "assistant", "content": SAID},
            ]
        },
        "type 'image' or 'text'",
    ),
}


def test_what_cannot_be_used_is_refused_by_its_line(folder: Path) -> None:
    for case, (row, allowed) in WRONG.items():
        (folder / "rows.jsonl").write_text("\n".join(json.dumps(each) for each in (ROWS["llava"], row)))
        with pytest.raises(InputError) as caught:
            read_conversations(folder / "rows.jsonl", "<image>")
        assert caught.value.argument == "data, line 2" and re.search(allowed, str(caught.value)), case


def test_placeholders_in_chat_messages_and_system_columns_are_used(folder: Path) -> None:
    said = [{"role": "user", "content": f"<image>{ASKED}"}, {"role": "assistant", "content": SAID}]
    row = {"images": ["a.png"], "messages": said, "system": "be brief", "video": None, "tools": [], "id": 3}
    read = read_conversation(row, "row", folder)
    assert read.messages == (
        message("system", "be brief"),
        message("user", ASKED, 1),
        message("assistant", SAID),
    )
    assert read.images == (folder / "a.png",)
    turns = [{"role": "user", "content": f"<image>\n{ASKED}"}, {"role": "assistant", "content": SAID}]
    assert (
        read_conversation({"image": "a.png", "conversations": turns}, "row", folder).messages
        == read.messages[1:]
    )
    indexed = [{"type": "text", "text": ASKED, "index": None}, {"type": "image", "text": None, "index": 0}]
    said = [{"role": "user", "content": indexed}, said[1]]
    read = read_conversation({"images": ["a.png"], "messages": said}, "row", folder)
    assert [part["type"] for part in read.messages[0]["content"]] == ["text", "image"]


def test_an_image_must_be_one(folder: Path) -> None:
    row = {"image": {"bytes": None, "path": "a.png"}, "prompt": ASKED, "response": SAID}
    with pytest.raises(InputError, match=r"data\[1\].*the path of an image, or an image"):
        read_conversations([ROWS["llava"] | {"image": Image.new("RGB", (8, 8))}, row])


def test_the_whole_file_is_checked_and_the_first_bad_rows_are_named(folder: Path) -> None:
    good, bad = ROWS["llava"], {"prompt": ASKED}
    rows = [good, bad, good, {**good, "video": "a.mp4"}, bad, bad, bad]
    (folder / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    with pytest.raises(InputError) as caught:
        read_conversations(folder / "rows.jsonl")
    said = str(caught.value)
    assert "5 rows that cannot be used" in said and "and 2 more" in said
    assert all(f"line {number}:" in said for number in (2, 4, 5)) and "line 6:" not in said


@pytest.mark.parametrize("mark", ["", "\ufeff"])
def test_lines_end_at_line_feeds_alone(mark: str, folder: Path) -> None:
    odd = "a\u2028b\u2029c\u0085d"
    lines = [json.dumps({"prompt": ASKED, "response": odd}, ensure_ascii=False), json.dumps(ROWS["llava"])]
    for end in ("\n", "\r\n"):
        (folder / "rows.jsonl").write_bytes((mark + end.join([*lines, ""])).encode())
        read = read_conversations(folder / "rows.jsonl")
        assert len(read) == 2 and read[0].messages[1] == message("assistant", odd)
    (folder / "rows.json").write_bytes((mark + f"[{lines[0]}]").encode())
    assert len(read_conversations(folder / "rows.json")) == 1


def test_other_encodings_are_named_with_their_line(folder: Path) -> None:
    for data, expected in (
        ("{}\n".encode("utf-16"), "rows.jsonl is UTF-16"),
        ("{}\n{}\n".encode("utf-16-le"), "line 1 of rows.jsonl has a NUL"),
        (b'\xef\xbb\xbf{}\n{"prompt": "caf\xe9"}', "line 2 of rows.jsonl has the byte 0xe9"),
    ):
        (folder / "rows.jsonl").write_bytes(data)
        with pytest.raises(InputError, match=expected):
            read_conversations(folder / "rows.jsonl")


def test_files_that_are_none_are_refused(folder: Path) -> None:
    for name, text in (("a.jsonl", "{"), ("a.json", "{"), ("a.json", "{}"), ("none", "")):
        if text:
            (folder / name).write_text(text)
        with pytest.raises(InputError, match="data"):
            read_conversations(folder / name)
