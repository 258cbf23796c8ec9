"""Scenes, their pixels, clips and sheets of them."""

import subprocess
import sys
import zlib

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.scenes import (
    CANVAS,
    COLUMNS,
    ROWS,
    Scene,
    describe,
    object_masks,
    questions,
    render,
    render_clip,
    sample_clip,
    sample_scene,
)
from mmspec.scenes.world import pairs
from tests.packaging.source_tree import ROOT

SEEDS = st.integers(min_value=0, max_value=2**62)


def fingerprint() -> int:
    scene = sample_scene(7)
    said = scene, describe(scene), questions(scene, np.random.default_rng(0), 6)
    return zlib.crc32(render(scene).tobytes() + repr(said).encode())


def test_scenes_import_no_torch_and_every_process_makes_the_same_pixels_and_words() -> None:
    code = (
        "import sys; from tests.reference.test_world import fingerprint;"
        "assert 'torch' not in sys.modules; print(fingerprint())"
    )
    command = [sys.executable, "-c", code]
    printed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert int(printed) == fingerprint()


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_objects_are_apart_inside_the_image_and_in_reading_order(seed: int) -> None:
    scene = sample_scene(seed)
    masks = object_masks(scene)
    assert masks.sum(axis=0).max() == 1, "two objects share a pixel"
    for thing, mask in zip(scene.objects, masks, strict=True):
        # A thin star at the edge may lose a pixel of a tip, never its body.
        assert mask.sum() > 60
        assert thing.row in ROWS and thing.column in COLUMNS
    assert all(right.x - left.x >= 8 for left, right in pairs(scene))


def test_clips_move_as_they_say_and_never_collide() -> None:
    wanted = {"left": (-20, 0), "right": (20, 0), "up": (0, -20), "down": (0, 20), "still": (0, 0)}
    moves: set[str] = set()
    for seed in range(60):
        clip = sample_clip(seed, frames=5)
        moves.update(clip.directions)
        for before, after, direction in zip(clip.at(0), clip.at(4), clip.directions, strict=True):
            assert (after.x - before.x, after.y - before.y) == wanted[direction]
        for frame in range(5):
            masks = object_masks(Scene(clip.at(frame), clip.scene.background, seed))
            assert masks.sum(axis=0).max() == 1
    assert moves == wanted.keys()
    frames = render_clip(next(clip for clip in map(sample_clip, range(50)) if "left" in clip.directions))
    assert frames.shape == (8, CANVAS, CANVAS, 3) and (frames[0] != frames[-1]).any()
