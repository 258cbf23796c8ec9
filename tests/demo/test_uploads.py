"""Uploads are checked before they are decoded."""

from pathlib import Path
from typing import Any

import pytest

from mmspec.demo.uploads import read_upload
from mmspec.errors import MediaError
from tests.media.files import clip

SCENE = str(Path("assets/images/scene.png"))


@pytest.mark.parametrize(
    ("kind", "payload", "said"),
    [
        ("image", {"path": None}, "must be an uploaded file"),
        ("image", {"path": "pyproject.toml", "orig_name": "a/b/mine.png"}, "^mine.png .*text"),
        ("video", {"path": SCENE, "orig_name": "mine.mp4"}, "^mine.mp4 .*PNG"),
        ("video", {"path": "no/such.mp4"}, "^such.mp4 "),
    ],
)
def test_what_is_no_picture_or_video_is_refused_by_its_name(kind: str, payload: Any, said: str) -> None:
    with pytest.raises(MediaError, match=said):
        read_upload(kind, payload)


def test_a_model_without_videos_is_shown_frames(tmp_path: Path) -> None:
    path = tmp_path / "clip.mp4"
    path.write_bytes(clip())
    upload = read_upload("video", {"path": str(path)})
    assert upload is not None and upload.frames > 4
    assert upload.media(4, takes_videos=True) == {"videos": [str(path)], "num_frames": 4}
    frames = upload.media(4, takes_videos=False)["images"]
    assert len(frames) == 4 and frames[0].ndim == 3
    assert len(upload.media(10_000, takes_videos=False)["images"]) == upload.frames
