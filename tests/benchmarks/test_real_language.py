"""Replies about images that drafters learn from: each is of its own images, in a file that training reads."""

from __future__ import annotations

from pathlib import Path

from PIL import Image, ImageChops

from benchmarks.real_language import SCENE_TASKS, read_rows, scene_rows, write_replies
from mmspec import MMSpecPipeline
from mmspec.assets import reference_models
from mmspec.evaluation.examples import scene_examples
from mmspec.training.data.conversation_file import read_conversations

ROWS = 7


def test_rows_are_of_all_tasks_and_show_the_images_of_their_scenes(tmp_path: Path) -> None:
    rows = scene_rows(tmp_path, ROWS)
    assert sorted(row["source"] for row in rows) == sorted([*SCENE_TASKS, SCENE_TASKS[0]])
    (pair,) = (row for row in rows if row["source"] == "two_images")
    first, second = (Image.open(tmp_path / path) for path in pair["image"])
    assert ImageChops.difference(first, second).getbbox() is not None
    tables = {example.images[0].tobytes() for task in SCENE_TASKS for example in scene_examples(task, ROWS)}
    shown = {Image.open(tmp_path / row["image"][0]).tobytes() for row in rows}
    assert not shown & tables


def test_a_reply_about_images_is_what_the_model_says_of_them_alone(tmp_path: Path) -> None:
    pipe = MMSpecPipeline.from_pretrained(reference_models()["scenes-llava"], accelerator="none")
    rows, out = scene_rows(tmp_path, ROWS), tmp_path / "replies.jsonl"
    how = {"max_new_tokens": 12, "batch_size": 3, "temperatures": (0.0,)}
    assert write_replies(pipe, rows[:5], out, **how) > 0
    write_replies(pipe, rows, out, **how)  # goes on
    written = {row["index"]: row for row in read_rows(out)}
    assert sorted(written) == list(range(ROWS))
    for index, row in enumerate(rows):
        images = [str(tmp_path / path) for path in row["image"]]
        said = pipe(row["prompt"], images=images, max_new_tokens=12)
        assert [written[index]["response"]] == said.text
    conversations = read_conversations(out)
    assert [len(each.opened().images) for each in conversations] == [
        len(row["image"]) for row in read_rows(out)
    ]
