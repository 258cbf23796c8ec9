"""Rows of conversations: three forms that say the same, and what is wrong with those that cannot be used."""

from __future__ import annotations

import json
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


@pytest.mark.parametrize("form", ROWS)
def test_all_forms_say_the_same(form: str, folder: Path) -> None:
    read = read_conversation(ROWS[form], "row", folder)
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


@pytest.mark.parametrize("case", WRONG)
def test_what_cannot_be_used_is_refused_by_its_line(case: str, folder: Path) -> None:
    row, allowed = WRONG[case]
    (folder / "rows.jsonl").write_text("\n".join(json.dumps(each) for each in (ROWS["llava"], row)))
    with pytest.raises(InputError, match=allowed) as caught:
        read_conversations(folder / "rows.jsonl", "<image>")
    assert caught.value.argument == "data, line 2"


@pytest.mark.parametrize(
    ("name", "text"), [("a.jsonl", "{"), ("a.json", "{"), ("a.json", "{}"), ("none", "")]
)
def test_files_that_are_none_are_refused(name: str, text: str, folder: Path) -> None:
    if text:
        (folder / name).write_text(text)
    with pytest.raises(InputError, match="data"):
        read_conversations(folder / name)
