"""Training replies about images: each belongs to its images, and training reads their file."""

from __future__ import annotations

from pathlib import Path

from benchmarks.real_language import read_rows, scene_rows, write_replies
from mmspec import MMSpecPipeline
from mmspec.assets import reference_models
from mmspec.training.data.conversation_file import read_conversations

ROWS = 7


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
