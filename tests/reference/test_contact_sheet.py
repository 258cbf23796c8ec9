"""Sheets of images: where each stands, how large it is, and what is written under it."""

from __future__ import annotations

import numpy as np
from PIL import Image

from mmspec.scenes.contact_sheet import MARGIN, image_sheet

RED, BLUE = (255, 0, 0), (0, 0, 255)


def extent(sheet: Image.Image, colour: tuple[int, int, int]) -> tuple[int, int, int, int]:
    """Left, top, width and height of what has that colour."""
    rows, columns = np.nonzero((np.asarray(sheet) == colour).all(-1))
    left, top = columns.min(), rows.min()
    return int(left), int(top), int(columns.max() - left + 1), int(rows.max() - top + 1)


def test_images_fit_their_square() -> None:
    for size, shown in (
        ((10, 10), (60, 60)),
        ((7, 7), (63, 63)),
        ((20, 10), (60, 30)),
        ((128, 128), (64, 64)),
        ((256, 64), (64, 16)),
    ):
        sheet = image_sheet([Image.new("RGB", size, RED)], [""], side=64)
        assert extent(sheet, RED) == (MARGIN, MARGIN, *shown)


def test_images_stand_in_lines() -> None:
    images = [Image.new("RGB", (8, 8), colour) for colour in ("green", "green", RED, "green", BLUE)]
    sheet = image_sheet(images, [""] * 5, columns=2, side=64)
    assert sheet.width == 2 * (64 + MARGIN) + MARGIN
    left, top, *_ = extent(sheet, RED)
    assert left == MARGIN and top > 64
    assert extent(sheet, BLUE)[0] == MARGIN and extent(sheet, BLUE)[1] > 2 * 64


def test_captions_are_wrapped_and_keep_their_lines() -> None:
    def ink(words: str) -> tuple[int, int]:
        """How far right and down the letters reach."""
        image = Image.new("RGB", (64, 64), RED)
        pixels = np.asarray(image_sheet([image], [words], side=64).convert("L"))[64 + MARGIN :]
        rows, columns = np.nonzero(pixels < 128)
        return int(columns.max()), int(rows.max())

    one, two = ink("aaa"), ink("aaa\naaa")
    assert two[0] == one[0] and two[1] > one[1]
    wrapped = ink("aaa " * 9)
    assert wrapped[0] < 64 + 2 * MARGIN and wrapped[1] > two[1]
    assert ink("aaa " * 500)[1] == ink("aaa\n" * 500)[1]  # what has no room is left out
