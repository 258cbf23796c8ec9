"""Training on a file of conversations: held-out, skipped and regenerated rows, and trained heads."""

from __future__ import annotations

import functools
import json
from collections.abc import Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from mmspec.errors import CheckpointError, InputError
from mmspec.targets import VisionLanguageTarget
from mmspec.training.data.conversation_file import read_conversation, read_conversations
from mmspec.training.data.conversations import TRIAL_ROWS, ConversationReader, ConversationRows
from mmspec.training.data.scenes import scene_data
from mmspec.training.drafter import train_drafter
from mmspec.training.recipes import RECIPES
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, save_family, tiny_image


@pytest.fixture(autouse=True)
def _short_trials(monkeypatch: pytest.MonkeyPatch) -> None:
    """Held-out replies of eight tokens, and one batch to measure heads on: those tests are elsewhere."""
    monkeypatch.setattr("mmspec.training.data.conversations.TRIAL_TOKENS", 8)
    monkeypatch.setattr("mmspec.training.drafter.MEASURED_BATCHES", 1)


@functools.cache
def reader() -> ConversationReader:
    model, processor = VISION_LANGUAGE_FAMILIES["llava"]()
    return ConversationReader(VisionLanguageTarget(model.requires_grad_(False)), processor)


def rows(count: int = 7) -> list[dict[str, Any]]:
    """Prompts of growing length, the first without an image."""
    replies = ["the circle is red and " * (1 + index) + "blue" for index in range(count)]
    conversations = [{"prompt": "describe the circle", "response": reply} for reply in replies]
    return [row | ({"image": tiny_image(index)} if index else {}) for index, row in enumerate(conversations)]


def data(**options: Any) -> ConversationRows:
    return ConversationRows(reader(), read_conversations(rows()), 3, 0, **options)


def test_equal_steps_give_equal_rows_and_the_last_are_held_out() -> None:
    longest = len(reader().example(data().rows[-1]).learnt)
    for step in range(6):
        one, again = data().batch(step, 0), data().batch(step, 0)
        for left, right in zip(one.examples, again.examples, strict=True):
            assert torch.equal(left.inputs["input_ids"], right.inputs["input_ids"])
            assert len(left.learnt) <= longest
    trial = data().trial()
    assert len(trial.requests) == TRIAL_ROWS and trial.end_token_ids == reader().end_token_ids != frozenset()
    with pytest.raises(InputError, match="held out"):
        ConversationRows(reader(), read_conversations(rows(TRIAL_ROWS)), 3, 0)


def test_too_few_rows_are_an_error_before_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = save_family("llava", tmp_path / "model")
    monkeypatch.setattr("mmspec.training.data.sources.load_model", None)
    with pytest.raises(InputError, match="data must have more than the 4 rows that are held out"):
        train_drafter(target, tmp_path / "out", rows(TRIAL_ROWS), steps=1)


def test_replies_are_the_targets_own_if_asked_for() -> None:
    made = data(regenerate=5)
    examples = made.batch(0, 0).examples
    assert {len(example.learnt) - example.answer for example in examples} <= {5, 6}  # and an end
    assert made.told and all(
        told.messages[1] != made.rows[index].messages[1] for index, told in made.told.items()
    )


def files(folder: Path, count: int, damaged: Collection[int]) -> list[dict[str, Any]]:
    """Rows of one image each, some of them cut short."""
    for index in range(count):
        tiny_image(index).save(folder / f"{index}.png")
        data = (folder / f"{index}.png").read_bytes()
        (folder / f"{index}.png").write_bytes(data[: len(data) // 2] if index in damaged else data)
    return [
        {"image": f"{index}.png", "prompt": "describe", "response": "the circle"} for index in range(count)
    ]


def damaged_rows(folder: Path, count: int, damaged: Collection[int], **options: Any) -> ConversationRows:
    rows = enumerate(files(folder, count, damaged))
    told = [read_conversation(row, f"data[{index}]", folder) for index, row in rows]
    return ConversationRows(reader(), told, 3, 0, **options)


@pytest.mark.parametrize("regenerate", [0, 3])
def test_rows_with_damaged_images_are_skipped_named_and_counted(
    regenerate: int, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    made = damaged_rows(tmp_path, 12, {2, 10}, regenerate=regenerate)
    assert [row.where for row in made.held_out] == ["data[7]", "data[8]", "data[9]", "data[11]"]
    assert len(made.trial().requests) == TRIAL_ROWS
    batches = [made.batch(step, 0) for step in range(6)]
    assert all(len(batch.examples) == 3 for batch in batches)
    assert {"data[2]", "data[10]"} == {*made.damaged.found} and len(made.left_out["damaged"]) == 2
    assert "data[2]" in caplog.text and "2.png" in caplog.text and "2 of 12" in caplog.text
    # a resumed run draws the same rows
    again = damaged_rows(tmp_path, 12, {2, 10}, regenerate=regenerate)
    for step in (5, 3):
        for one, other in zip(batches[step].examples, again.batch(step, 0).examples, strict=True):
            assert torch.equal(one.inputs["input_ids"], other.inputs["input_ids"])
            assert torch.equal(one.inputs["pixel_values"], other.inputs["pixel_values"])


@pytest.mark.parametrize(
    ("family", "method"),
    [
        *(("llava", name) for name in RECIPES if not RECIPES[name].record.of_images),
        ("qwen2_5_vl", "eagle3"),
        ("qwen2_5_vl", "vispec"),
    ],
)
@pytest.mark.every(7)
def test_heads_are_trained_on_a_file(family: str, method: str, tmp_path: Path) -> None:
    """Every method, with and without images and with a damaged one, for a target in half precision."""
    target, file = save_family(family, tmp_path / "target"), tmp_path / "rows.jsonl"
    given = [{"prompt": "describe the circle", "response": "it is red"}, *files(tmp_path, 7, damaged={6})]
    file.write_text("\n".join(map(json.dumps, given)))
    losses: list[float] = []
    how: dict[str, Any] = {
        "max_length": 200,
        "dtype": "bfloat16",
        "steps": 2,
        "batch_size": 2,
        "accumulate": 2,
    }
    how["on_step"] = lambda step, loss: losses.append(loss)
    out = train_drafter(target, tmp_path / "out", method=method, data=file, **how)
    made = json.loads((out / "training.json").read_text())
    assert made["stages"][0]["acceptance"] >= 1 and made["target_dtype"] == "bfloat16"
    (damaged,) = made["skipped_rows"]["damaged"]
    assert "data, line 8" in damaged and "6.png" in damaged
    assert len(losses) == 2 and all(0 < loss < 100 for loss in losses)
    ending = f"--steps 2 --data {file.as_posix()} --max-length 200 --dtype bfloat16 --accumulate 2"
    assert made["command"].endswith(ending)
    weights = load_file(out / "model.safetensors").values()
    assert all(weight.isfinite().all() for weight in weights if weight.is_floating_point())


def test_data_are_checked_before_weights_are_read(tmp_path: Path) -> None:
    target, out = save_family("llava", tmp_path / "target"), tmp_path / "out"
    with pytest.raises(InputError, match="max_length"):
        train_drafter(target, out, scene_data, max_length=9, steps=1)
    (target / "model.safetensors").rename(target / "x.safetensors")
    with pytest.raises(InputError, match="line 1"):
        (tmp_path / "rows.jsonl").write_text("{}")
        train_drafter(target, out, data=tmp_path / "rows.jsonl", steps=1)
    with pytest.raises(InputError, match="learns from images"):
        train_drafter(target, out, data=rows(), method="cjd", steps=1)
    with pytest.raises(CheckpointError, match="target"):
        train_drafter(target, out, data=rows(), steps=1)
    template = target / "chat_template.jinja"
    without_system = "for message in messages if message['role'] != 'system'"
    template.write_text(template.read_text().replace("for message in messages", without_system))
    with pytest.raises(InputError, match=r"data\[0\].*text of the system"):
        row = {"prompt": "describe", "response": "no", "system": "be brief"}
        train_drafter(target, out, data=[row] * 6, steps=1)
