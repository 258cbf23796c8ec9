"""Videos: frames, times, sampling, and failures of the child process."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from transformers.video_utils import VideoMetadata

from mmspec.errors import MediaError, MissingDependencyError
from mmspec.media import MediaLimits, Video, decoding, load_video
from mmspec.media.video import sample_indices
from tests.media.files import clip, cut, encoded, fading_gif, laid, noise

CLIP = clip()  # 12 frames at 10 a second, 64 x 48
LOSSY = 3  # mpeg4 at its best quality is this close


def shown(video: Video) -> list[int]:
    """Indices of a clip's frames, by their brightness."""
    upper = video.frames[:, 4, 4, 0].astype(int)
    return [round(value / 20) for value in upper]


@pytest.mark.parametrize("container", ["mp4", "mov", "matroska", "avi"])
def test_frames_and_times_of_every_container(container: str) -> None:
    video = load_video(clip(container=container), num_frames=4)
    assert video.frames.shape == (4, 48, 64, 3) and video.frames.dtype == np.uint8
    assert shown(video) == [0, 3, 6, 9] == video.frames_indices.tolist()
    assert np.abs(video.frames[:, -4, 4].astype(int) - 255).max() <= LOSSY
    assert np.abs(video.frames[:, -4, -4].astype(int)).max() <= LOSSY
    assert (video.total_num_frames, video.fps, video.backend) == (12, 10.0, "pyav")
    assert video.timestamps is not None
    assert np.allclose(video.timestamps, [0, 0.3, 0.6, 0.9], atol=1e-6)


def test_seeking_across_key_frames_finds_the_same_frames() -> None:
    for gop in (1, 5, 30):
        video = load_video(clip(30, gop=gop), num_frames=7)
        assert [value % 12 for value in video.frames_indices] == shown(video)
        assert video.frames_indices.tolist() == [0, 4, 8, 12, 17, 21, 25]
    assert shown(load_video(CLIP)) == list(range(12))


EIGHT = {  # a display matrix, and the same by NumPy
    (1, 0, 0, 1): lambda frame: frame,
    (0, 1, -1, 0): lambda frame: np.rot90(frame, 3),
    (-1, 0, 0, -1): lambda frame: np.rot90(frame, 2),
    (0, -1, 1, 0): lambda frame: np.rot90(frame, 1),
    (-1, 0, 0, 1): lambda frame: frame[:, ::-1],
    (1, 0, 0, -1): lambda frame: frame[::-1],
    (0, 1, 1, 0): lambda frame: frame.swapaxes(0, 1),
    (0, -1, -1, 0): lambda frame: np.rot90(frame, 2).swapaxes(0, 1),
}


def test_display_matrices_turn_and_mirror_as_players_do() -> None:
    plain = load_video(clip(size=(100, 50)), num_frames=1).frames[0]  # rows that no library pads to
    for matrix, same in EIGHT.items():
        video = load_video(laid(clip(size=(100, 50)), matrix), num_frames=1)
        assert np.array_equal(video.frames[0], same(plain)), matrix


UNEVEN = [0, 40, 80, 500, 1000, 1500, 1520, 1540, 3000]


@pytest.mark.parametrize(("container", "start"), [("mp4", 2500), ("matroska", 0)])
def test_models_are_told_the_times_of_frames_at_uneven_rates(container: str, start: int) -> None:
    data = clip(times_ms=[start + time for time in UNEVEN], container=container)
    for asked in ({"num_frames": 4}, {"fps": 2}):
        video = load_video(data, **asked)
        told = VideoMetadata(**video.metadata)
        times = np.array(UNEVEN)[video.frames_indices] / 1000  # since the first frame
        assert shown(video) == video.frames_indices.tolist()
        assert np.allclose(told.timestamps, times, atol=1e-6)
        assert video.timestamps is not None and np.allclose(video.timestamps, times, atol=1e-6)
        assert all(isinstance(index, int) for index in told.frames_indices or ["none"])
        assert (told.height, told.width, told.duration) == (48, 64, pytest.approx(9 * 3 / 8, rel=1e-3))
        json.dumps(video.metadata)
        assert told.sampled_fps == pytest.approx(len(video.frames) * 8 / 27, rel=1e-3)
    assert video.fps == round(8 / 3, 3)
    assert shown(video)[:6] == [0, 3, 4, 5, 7, 7]  # nothing new is on screen between 1.54 s and 3 s


def test_what_an_edit_list_cuts_off_is_not_in_the_video() -> None:
    for start, stop in ((0, 600), (300, 700)):
        video = load_video(cut(CLIP, start, stop))
        assert shown(video) == list(range(start // 100, stop // 100))
        assert video.metadata["frames_indices"] == list(range((stop - start) // 100)) and video.fps == 10


def test_long_videos_are_sampled_within_the_limits() -> None:
    ten_seconds = load_video(clip(times_ms=[index * 100 // 3 for index in range(300)]))
    assert len(ten_seconds.frames) == MediaLimits().max_frames
    assert ten_seconds.frames_indices.tolist() == [index * 300 // 256 for index in range(256)]
    assert shown(load_video(CLIP, limits=MediaLimits(max_frames=4))) == [0, 3, 6, 9]
    assert shown(load_video(CLIP, limits=MediaLimits(max_video_pixels=64 * 48 * 6))) == [0, 2, 4, 6, 8, 10]


def test_animated_gifs_keep_their_durations() -> None:
    video = load_video(fading_gif([100, 300, 200]))
    assert video.frames[:, 0, 0, 0].tolist() == [0, 20, 40] and video.backend == "pyav"
    assert video.timestamps is not None and video.timestamps.tolist() == [0, 0.1, 0.4]
    unsaid = load_video(fading_gif([0, 0, 0]))
    assert unsaid.timestamps is not None and unsaid.timestamps.tolist() == [0, 0.1, 0.2]  # as browsers do
    single = load_video(fading_gif([100]), fps=3)
    assert (len(single.frames), single.fps, single.metadata["duration"]) == (1, None, None)


def test_transparent_places_of_gifs_are_white() -> None:
    frames = [Image.new("RGBA", (20, 12)) for _ in range(3)]
    for index, frame in enumerate(frames):
        frame.paste((200, 0, 0, 255), (2 * index, 2, 2 * index + 6, 8))
    video = load_video(encoded(frames[0], "GIF", save_all=True, append_images=frames[1:], disposal=2))
    assert video.frames[:, 4, 4].tolist() == [[200, 0, 0]] * 3
    assert video.frames[:, 0, 0].tolist() == [[255, 255, 255]] * 3


def test_uniform_sampling_agrees_with_transformers() -> None:
    for total, count in itertools.product((1, 7, 100), (1, 2, 7, 100)):
        if count <= total:
            chosen = sample_indices(total, None, num_frames=count, fps=None)
            assert chosen.tolist() == (np.arange(count) * total // count).tolist()
    times = np.arange(100) / 25  # 4 s
    assert sample_indices(100, times, num_frames=None, fps=1.0).tolist() == [0, 25, 50, 75]
    assert sample_indices(100, times + 7, num_frames=None, fps=25.0).tolist() == list(range(100))
    ntsc = np.arange(90) * 1001 / 30000
    assert sample_indices(90, ntsc, num_frames=None, fps=2).tolist() == [0, 15, 30, 44, 59, 74, 89]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"max_pixels": 3071}, "at most 3,071 pixels"),
        ({"max_video_seconds": 1}, "at most 1 seconds"),
        ({"max_video_seconds": 0.01}, "at most 0.01 seconds"),
        ({"max_video_bytes": 100}, "at most 100 bytes"),
        ({"decode_memory_bytes": 150_000_000}, "more than 150,000,000 bytes"),
        ({"decode_timeout_s": 0.01}, "decoded within at most 0.01 seconds"),
    ],
)
def test_every_limit_is_kept_and_named(change: dict[str, Any], expected: str) -> None:
    with pytest.raises(MediaError) as caught:
        load_video(CLIP, limits=MediaLimits(**change))
    assert expected in str(caught.value)
    assert f"MediaLimits({next(iter(change))}=...) raises this limit" in str(caught.value)


@pytest.mark.parametrize(
    ("asked", "change", "expected"),
    [
        (
            {"fps": 10},
            {"max_frames": 11},
            "at most 11 frames with num_frames or a lower fps; .*got 12 frames",
        ),
        ({"num_frames": 12}, {"max_frames": 11}, "^num_frames must be .* at most 11; .*got 12"),
        (
            {"num_frames": 12},
            {"max_video_pixels": 36_863},
            "at most 36,863 pixels in all; .*got 12 frames of 64 x 48",
        ),
    ],
)
def test_more_frames_than_a_limit_are_refused_if_asked_for(
    asked: dict[str, Any], change: dict[str, Any], expected: str
) -> None:
    with pytest.raises(MediaError, match=expected):
        load_video(CLIP, **asked, limits=MediaLimits(**change))
    frames = [noise(8, 6)] * 12
    with pytest.raises(MediaError, match="at most 11 frames with num_frames; .*got 12 frames") as caught:
        load_video(frames, limits=MediaLimits(max_frames=11))
    assert "fps" not in str(caught.value)


CHILD = Path(decoding.__file__).with_name("decode_child.py").read_text()
CHILDREN = {
    "hangs at once": "import time; time.sleep(60)",
    "hangs between frames": (
        'import os, struct, time; os.write(1, b\'{"reader": "x", "width": 8, "height": 8, "total": 1}\\n\' + '
        "struct.pack('d', 0)); os.write(1, b'x' * 100); time.sleep(60)"
    ),
    "loops": CHILD.replace("main(sys.argv[1:])", "limit_process(1, 2**40)\n    while True: pass"),
    "crashes": "import os; os.abort()",
    "writes no JSON": "print('hello')",
    "writes nothing": "",
}


@pytest.mark.parametrize("name", CHILDREN)
def test_a_child_that_misbehaves_is_ended(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = tmp_path / "decode_child.py"
    program.write_text(CHILDREN[name])
    monkeypatch.setattr(decoding, "__file__", str(tmp_path / "decoding.py"))
    started: list[subprocess.Popen[bytes]] = []
    popen = subprocess.Popen
    monkeypatch.setattr(
        subprocess, "Popen", lambda *given, **how: started.append(popen(*given, **how)) or started[0]
    )
    start = time.monotonic()
    seconds = 0.05 if "hangs" in name else 60
    is_late = "hangs" in name or name == "loops"
    expected = f"at most {seconds} seconds" if is_late else "is damaged, truncated"
    with pytest.raises(MediaError, match=expected):
        load_video(CLIP * 100, limits=MediaLimits(decode_timeout_s=seconds))  # more than a pipe holds
    assert time.monotonic() - start < 30
    with pytest.raises(ProcessLookupError):
        os.kill(started[0].pid, 0)


def test_time_without_a_processor_is_not_counted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    waits = CHILD.replace("    limit_process(", "    __import__('time').sleep(1.2)\n    limit_process(")
    (tmp_path / "decode_child.py").write_text(waits)
    monkeypatch.setattr(decoding, "__file__", str(tmp_path / "decoding.py"))
    clip = load_video(CLIP, num_frames=3, limits=MediaLimits(decode_timeout_s=1))
    assert len(clip.frames) == 3


def test_a_script_without_a_main_guard_can_load_videos(tmp_path: Path) -> None:
    (tmp_path / "clip.mp4").write_bytes(CLIP)
    # and modules beside the script, or in our folder, must not reach the child
    (tmp_path / "json.py").write_text("raise SystemExit('shadowed')")
    script = tmp_path / "script.py"
    script.write_text(
        "import sys; sys.path.pop(0)\n"
        "from mmspec.media import load_video\n"
        "print(load_video('clip.mp4', num_frames=3).frames.shape)\n"
    )
    root = str(Path(__file__).parents[2])
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.stdout, done.stderr) == ("(3, 48, 64, 3)\n", "")


def test_without_a_decoding_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install av"):
        load_video(CLIP)


def survive(count: int, capfd: pytest.CaptureFixture[str]) -> None:
    for seed in range(count):
        random, data = np.random.default_rng(seed), bytearray(CLIP)
        for _ in range(int(random.integers(1, 9))):
            data[int(random.integers(len(data)))] = int(random.integers(256))
        end = len(data) - int(random.integers(0, 300)) * int(random.random() < 0.2)
        try:
            load_video(bytes(data[:end]), num_frames=1, limits=MediaLimits(decode_timeout_s=2))
        except MediaError as error:
            assert len(str(error)) < 400
    assert capfd.readouterr() == ("", "")


def test_mutated_clips_raise_nothing_but_media_errors(capfd: pytest.CaptureFixture[str]) -> None:
    survive(8, capfd)
