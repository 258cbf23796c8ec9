"""Scenes, their pixels, clips and sheets of them."""

import subprocess
import sys
import zlib
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
    GENERAL,
    IMAGE_TOKENS,
    ROWS,
    Scene,
    describe,
    draw_contact_sheet,
    object_masks,
    questions,
    render,
    render_clip,
    sample_clip,
    sample_scene,
)
from mmspec.scenes.contact_sheet import MARGIN, image_sheet
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


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_scenes_for_image_tokens_have_one_or_two_large_objects_in_a_visible_order(seed: int) -> None:
    scene = sample_scene(seed, profile=IMAGE_TOKENS)
    assert 1 <= len(scene.objects) <= 2
    assert all(thing.diameter >= 26 for thing in scene.objects)
    assert (np.diff([thing.x for thing in scene.objects]) >= IMAGE_TOKENS.min_step).all()
    masks = object_masks(scene, 64)
    assert masks.sum(axis=(1, 2)).min() > 4 * 16, "every object covers several tokens of 4 x 4 pixels"
    assert not (masks.sum(axis=0) > 1).any()


@given(SEEDS)
@settings(max_examples=50, deadline=None)
def test_every_object_can_be_seen(seed: int) -> None:
    scene = sample_scene(seed)
    image = render(scene).astype(int)
    without = render(Scene((), scene.background, scene.seed)).astype(int)
    for mask in object_masks(scene):
        assert np.abs(image - without)[mask].mean() > 12


def test_an_image_is_textured_bytes_of_the_size_asked_for() -> None:
    for size in (48, 64, CANVAS, 128):
        image = render(sample_scene(3), size)
        assert image.shape == (size, size, 3) and image.dtype == np.uint8
        assert len(np.unique(image.reshape(-1, 3), axis=0)) > size * size / 3


def test_a_profile_and_a_number_of_objects_can_be_chosen() -> None:
    assert sample_scene(5) == sample_scene(5, profile=GENERAL) != sample_scene(5, profile=IMAGE_TOKENS)
    for count in (1, 2, 3):
        assert {len(sample_scene(seed, objects=count).objects) for seed in range(20)} == {count}
    with pytest.raises(InputError, match="1 to 2"):
        sample_scene(1, objects=3, profile=IMAGE_TOKENS)
    assert {sample_scene(seed).class_label for seed in range(1000)} == set(range(48))


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


RED, BLUE = (255, 0, 0), (0, 0, 255)


def extent(sheet: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, width and height of what has that colour."""
    rows, columns = np.nonzero((np.asarray(sheet) == colour).all(-1))
    left, top = columns.min(), rows.min()
    return int(left), int(top), int(columns.max() - left + 1), int(rows.max() - top + 1)


def test_images_on_a_sheet_fit_their_squares_and_stand_in_lines() -> None:
    sizes = {
        (10, 10): (60, 60),
        (7, 7): (63, 63),
        (20, 10): (60, 30),
        (128, 128): (64, 64),
        (256, 64): (64, 16),
    }
    for size, shown in sizes.items():
        sheet = image_sheet([Image.new("RGB", size, RED)], [""], side=64)
        assert extent(sheet, RED) == (MARGIN, MARGIN, *shown)
    images = [Image.new("RGB", (8, 8), colour) for colour in ("green", "green", RED, "green", BLUE)]
    sheet = image_sheet(images, [""] * 5, columns=2, side=64)
    assert sheet.width == 2 * (64 + MARGIN) + MARGIN
    left, top, *_ = extent(sheet, RED)
    assert left == MARGIN and top > 64
    assert extent(sheet, BLUE)[0] == MARGIN and extent(sheet, BLUE)[1] > 2 * 64


def test_captions_are_wrapped_and_keep_their_lines() -> None:
    def ink(words: str) -> tuple[int, int]:
        """The rightmost and the lowest pixel of the letters."""
        image = Image.new("RGB", (64, 64), RED)
        pixels = np.asarray(image_sheet([image], [words], side=64).convert("L"))[64 + MARGIN :]
        rows, columns = np.nonzero(pixels < 128)
        return int(columns.max()), int(rows.max())

    one, two = ink("aaa"), ink("aaa\naaa")
    assert two[0] == one[0] and two[1] > one[1]
    wrapped = ink("aaa " * 9)
    assert wrapped[0] < 64 + 2 * MARGIN and wrapped[1] > two[1]
    assert ink("aaa " * 500)[1] == ink("aaa\n" * 500)[1]  # what has no room is left out


def test_the_contact_sheet_is_an_image_of_all_scenes(tmp_path: Path) -> None:
    with Image.open(draw_contact_sheet(tmp_path / "new" / "sheet.png", seed=5, count=8)) as sheet:
        assert sheet.width > 6 * 2 * CANVAS and sheet.height > 2 * 2 * CANVAS


def test_a_bad_argument_is_named() -> None:
    for call, argument in (
        (lambda: sample_scene(-1), "seed"),
        (lambda: sample_scene(0, objects=4), "objects"),
        (lambda: sample_clip(0, frames=0), "frames"),
        (lambda: render(sample_scene(0), 1000), "size"),
        (lambda: draw_contact_sheet("never.png", count=0), "count"),
    ):
        with pytest.raises(InputError) as caught:
            call()
        assert caught.value.argument == argument
