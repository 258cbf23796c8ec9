import hashlib
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from mmspec.errors import InputError
from mmspec.scenes import (
    CANVAS,
    COLUMNS,
    ROWS,
    caption,
    clip_caption,
    describe,
    draw_contact_sheet,
    object_masks,
    questions,
    render,
    render_clip,
    sample_clip,
    sample_scene,
)
from mmspec.scenes.world import pairs

SEEDS = st.integers(min_value=0, max_value=2**62)
ROOT = Path(__file__).parents[2]


def fingerprint() -> str:
    """Pixels and words of some scenes and clips as one hash."""
    digest = hashlib.sha256()
    for seed in (0, 7, 999_999, 2**61):
        scene, clip = sample_scene(seed), sample_clip(seed, frames=3)
        rng = np.random.default_rng(seed)
        texts = [
            caption(scene),
            describe(scene),
            clip_caption(clip),
            repr(questions(scene, rng, 6)),
            repr(scene),
        ]
        digest.update("\n".join(texts).encode())
        digest.update(render(scene).tobytes() + render(scene, 64).tobytes() + render_clip(clip).tobytes())
    return digest.hexdigest()


def test_a_fresh_process_makes_the_same_pixels_and_words() -> None:
    code = "from tests.reference.test_world import fingerprint; print(fingerprint())"
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == fingerprint()


def test_scenes_import_no_torch() -> None:
    code = "import sys, mmspec.scenes; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_objects_are_apart_inside_the_image_and_in_reading_order(seed: int) -> None:
    scene = sample_scene(seed)
    masks = object_masks(scene)
    assert masks.sum(axis=0).max() == 1, "two objects share a pixel"
    for thing, mask in zip(scene.objects, masks, strict=True):
        # A thin star at the edge may lose a pixel of a tip, never its body.
        assert mask.sum() > 60
        assert thing.row in ROWS and thing.column in COLUMNS
    for left, right in pairs(scene):
        assert right.x - left.x >= 8


@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_every_object_can_be_seen(seed: int) -> None:
    scene = sample_scene(seed)
    image = render(scene).astype(int)
    without = render(type(scene)((), scene.background, scene.seed)).astype(int)
    for mask in object_masks(scene):
        assert np.abs(image - without)[mask].mean() > 12


def test_a_image_is_textured_bytes_of_the_size_asked_for() -> None:
    for size in (48, 64, CANVAS, 128):
        image = render(sample_scene(3), size)
        assert image.shape == (size, size, 3)
        assert image.dtype == np.uint8
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > size * size / 3


def test_the_number_of_objects_can_be_chosen() -> None:
    for count in (1, 2, 3):
        assert {len(sample_scene(seed, objects=count).objects) for seed in range(20)} == {count}


def test_class_labels_use_the_whole_range() -> None:
    labels = {sample_scene(seed).class_label for seed in range(1000)}
    assert labels == set(range(48))


def test_clips_move_as_they_say_and_never_collide() -> None:
    moves: set[str] = set()
    for seed in range(60):
        clip = sample_clip(seed, frames=5)
        moves.update(clip.directions)
        first, last = clip.at(0), clip.at(4)
        for before, after, direction in zip(first, last, clip.directions, strict=True):
            travelled = (after.x - before.x, after.y - before.y)
            wanted = {"left": (-20, 0), "right": (20, 0), "up": (0, -20), "down": (0, 20), "still": (0, 0)}
            assert travelled == wanted[direction]
        for frame in range(5):
            masks = object_masks(type(clip.scene)(clip.at(frame), clip.scene.background, seed))
            assert masks.sum(axis=0).max() == 1
    assert moves == {"left", "right", "up", "down", "still"}


def test_a_clip_has_as_many_frames_as_asked_and_things_move_in_it() -> None:
    clip = next(clip for clip in map(sample_clip, range(50)) if set(clip.directions) != {"still"})
    frames = render_clip(clip)
    assert frames.shape == (8, CANVAS, CANVAS, 3)
    assert (frames[0] != frames[-1]).any()


def test_the_contact_sheet_is_a_image_of_all_scenes(tmp_path: Path) -> None:
    path = draw_contact_sheet(tmp_path / "new" / "sheet.png", seed=5, count=8)
    with Image.open(path) as sheet:
        assert sheet.width > 6 * 2 * CANVAS and sheet.height > 2 * 2 * CANVAS


def test_a_bad_argument_is_named() -> None:
    for call, argument in (
        (lambda: sample_scene(-1), "seed"),
        (lambda: sample_scene(0, objects=4), "objects"),
        (lambda: sample_clip(0, frames=0), "frames"),
        (lambda: render(sample_scene(0), 1000), "size"),
        (lambda: draw_contact_sheet("never.png", count=0), "count"),
    ):
        with pytest.raises(InputError, match=argument) as caught:
            call()
        assert caught.value.argument == argument
