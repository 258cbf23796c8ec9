"""Every kind of image that is accepted, by exact pixel values; and fuzzed files."""

from __future__ import annotations

import base64
import io
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

import mmspec
from mmspec.errors import InputError, MediaError
from mmspec.media import MediaLimits, image_grid, load_image
from tests.media.files import encoded, fading_gif, noise

FORMATS = ("JPEG", "PNG", "WEBP", "GIF", "BMP")
LOSSLESS: dict[str, dict[str, Any]] = {"PNG": {}, "BMP": {}, "WEBP": {"lossless": True}}
IMAGE = noise(8, 6)


def pixels(source: object, **options: Any) -> np.ndarray:
    image = load_image(source, **options)
    assert image.mode == "RGB" and image.info == {}
    return np.asarray(image)


@pytest.mark.parametrize("format", LOSSLESS)
def test_files_bytes_and_data_urls_of_lossless_formats_keep_every_pixel(format: str, tmp_path: Path) -> None:
    data = encoded(IMAGE, format, **LOSSLESS[format])
    path = tmp_path / "image with any suffix.txt"
    path.write_bytes(data)
    url = "data:image/any;base64," + base64.b64encode(data).decode()
    encoded_bytes = "data:image/png," + "".join(f"%{byte:02x}" for byte in data)
    for source in (path, data, bytearray(data), memoryview(data), url.replace("+", "%2B"), encoded_bytes):
        assert np.array_equal(pixels(source), np.asarray(IMAGE))


@pytest.mark.parametrize("format", LOSSLESS)
def test_base64_buffers_and_dicts_hold_the_same_image(format: str) -> None:
    data = encoded(IMAGE, format, **LOSSLESS[format])
    text = base64.b64encode(data).decode()
    written = io.BytesIO()
    written.write(data)  # its position is the end
    url = f"data:image/png;base64,{text}"
    named = {"bytes": data, "path": "elsewhere.png"}  # as rows of datasets hold images
    dicts = [
        {"base64": text},
        {"base64": text.encode()},
        {"base64": url},
        {"url": url},
        named,
        {"path": None, **named},
    ]
    for source in (written, text, base64.encodebytes(data).decode(), *dicts):
        assert np.array_equal(pixels(source), np.asarray(IMAGE))


def test_a_string_is_the_path_of_a_file_before_it_is_base64(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = base64.b64encode(encoded(IMAGE, "PNG")).decode()
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (3, 2)).save(text[:48], "PNG")
    assert pixels(text[:48]).shape == (2, 3, 3)
    assert np.array_equal(pixels(text), np.asarray(IMAGE))


def test_limits_hold_for_base64_buffers_and_dicts() -> None:
    data = encoded(IMAGE, "PNG")
    text = base64.b64encode(data).decode()
    small, narrow = MediaLimits(max_bytes=len(data) - 1), MediaLimits(max_pixels=47)
    for source in (io.BytesIO(data), text, {"base64": text}, {"bytes": data}):
        for limits, expected in ((small, "max_bytes"), (narrow, "max_pixels")):
            with pytest.raises(MediaError, match=expected):
                load_image(source, limits=limits)
    for address in ("http://127.0.0.1/a.png", "http://10.0.0.1/a.png"):
        with pytest.raises(MediaError):
            load_image({"url": address})
    with pytest.raises(MediaError, match=r"at most 20,000,000 bytes; .*got base64 of 40,000,000 characters"):
        load_image({"base64": "A" * 40_000_000})


def test_every_format_is_accepted() -> None:
    flat = Image.new("RGB", (8, 6), (200, 40, 90))
    for format in FORMATS:  # JPEG and WEBP lose a little
        assert np.abs(pixels(encoded(flat, format)).astype(int) - (200, 40, 90)).max() <= 6
    assert pixels(encoded(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG")).tolist() == [[[1, 2, 3]]]


def test_layouts_of_arrays() -> None:
    last = np.asarray(IMAGE)  # [6, 8, 3]
    first = np.moveaxis(last, -1, 0)
    mirrored_twice = last[:, ::-1][:, ::-1]  # negative strides
    for same in (last, first, torch.tensor(last), torch.tensor(first), last.astype(np.int64), mirrored_twice):
        assert np.array_equal(pixels(same), last)
    grey = last[..., 0]
    for same in (grey, grey[..., None], grey[None], torch.tensor(grey)):
        assert np.array_equal(pixels(same), np.repeat(grey[..., None], 3, axis=-1))
    assert pixels(np.eye(2, dtype=bool)).tolist() == [[[255] * 3, [0] * 3], [[0] * 3, [255] * 3]]
    ambiguous = np.arange(27, dtype=np.uint8).reshape(3, 3, 3)
    assert np.array_equal(pixels(ambiguous), ambiguous)
    assert np.array_equal(pixels(torch.tensor(ambiguous)), np.moveaxis(ambiguous, 0, -1))


def test_transparent_places_become_white() -> None:
    # 127 = round(255 * (1 - 128/255)): half of white shines through the half transparent red
    half_red, hidden = (255, 0, 0, 128), (9, 9, 9, 0)
    rgba = np.array([[half_red, hidden, (1, 2, 3, 255)]], np.uint8)
    expected = [[[255, 127, 127], [255, 255, 255], [1, 2, 3]]]
    for source in (rgba, Image.fromarray(rgba), encoded(Image.fromarray(rgba), "PNG"), rgba / 255):
        assert pixels(source).tolist() == expected

    grey = Image.new("LA", (1, 1), (0, 0))
    palette = Image.new("P", (1, 1), 1)
    palette.putpalette([0, 0, 0, 9, 9, 9])
    flat = Image.new("RGB", (1, 1), (1, 2, 3))
    for data in (
        encoded(grey, "PNG"),
        encoded(palette, "PNG", transparency=1),
        encoded(palette, "PNG", transparency=b"\xff\x00"),
        encoded(palette, "GIF", transparency=1),
        encoded(flat, "PNG", transparency=(1, 2, 3)),
    ):
        assert pixels(data).tolist() == [[[255, 255, 255]]]


@pytest.mark.parametrize("orientation", range(1, 9))
def test_exif_rotations_are_applied_once(orientation: int) -> None:
    format, exif = ("PNG", "WEBP")[orientation % 2], Image.Exif()
    exif[0x0112] = orientation
    data = encoded(IMAGE, format, exif=exif, **LOSSLESS[format])
    upright = np.asarray(IMAGE)
    expected = {
        1: upright,
        2: upright[:, ::-1],
        3: upright[::-1, ::-1],
        4: upright[::-1],
        5: upright.swapaxes(0, 1),
        6: np.rot90(upright, -1),
        7: np.rot90(upright, 2).swapaxes(0, 1),
        8: np.rot90(upright, 1),
    }[orientation]
    assert np.array_equal(pixels(data), expected)
    assert np.array_equal(pixels(Image.open(io.BytesIO(data))), expected)
    assert np.array_equal(pixels(load_image(data)), expected)  # a second time changes nothing


def test_limits_can_be_raised_and_lowered() -> None:
    with pytest.raises(MediaError, match=r"at most 47 pixels; MediaLimits\(max_pixels.*8 x 6 pixels"):
        load_image(IMAGE, limits=MediaLimits(max_pixels=47))
    load_image(IMAGE, limits=MediaLimits(max_pixels=48))
    load_image(np.zeros((1, 500)), limits=MediaLimits(max_aspect=500))
    # above the size at which Pillow itself warns or refuses: our limit alone decides
    data = encoded(Image.new("1", (13400, 13400)), "PNG")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with pytest.raises(MediaError, match="at most 100,000,000 pixels"):
            load_image(data, limits=MediaLimits(max_pixels=10**8))


def mutate(data: bytes, edits: list[tuple[int, int]], cut: int) -> bytes:
    mutated = bytearray(data)
    for position, value in edits:
        mutated[position % len(mutated)] = value
    return bytes(mutated[: len(mutated) - cut])


def accept_or_refuse(data: bytes | str) -> None:
    """Nothing but an image or a MediaError may come out, without a warning."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        try:
            load_image(data, limits=MediaLimits(max_pixels=10**6))  # keeps the fuzzing fast
        except MediaError as error:
            assert len(str(error)) < 400


@pytest.fixture(scope="module")
def seeds() -> dict[str, bytes]:
    exif = Image.Exif()
    exif[0x0112], exif[0x010E] = 6, "a description"
    files = {f: encoded(IMAGE, f, **({} if f in ("GIF", "BMP") else {"exif": exif})) for f in FORMATS}
    return files | {"animated": fading_gif([100, 100]), "palette": encoded(IMAGE.convert("P"), "PNG")}


EDITS = st.lists(st.tuples(st.integers(0, 400), st.integers(0, 255)), max_size=6)


@settings(max_examples=150, deadline=None, database=None)
@given(edits=EDITS, cut=st.integers(0, 40))
def test_mutated_files_raise_nothing_but_media_errors(
    seeds: dict[str, bytes], edits: list[tuple[int, int]], cut: int
) -> None:
    for data in seeds.values():
        accept_or_refuse(mutate(data, edits, cut))


PREFIXES = [b"", b"\xff\xd8\xff", b"BM", b"GIF89a", b"RIFF\0\0\0\0WEBP"]
STARTS = ["", "data:", "data:image/png;base64,", "ftp://", "/"]


@settings(max_examples=100, deadline=None, database=None)
@given(data=st.binary(max_size=200), text=st.text(max_size=60), start=st.integers(0, 4))
def test_arbitrary_bytes_and_strings_raise_only_media_errors(data: bytes, text: str, start: int) -> None:
    accept_or_refuse(PREFIXES[start] + data)
    accept_or_refuse(STARTS[start] + text)


def test_importing_media_imports_no_heavy_library_and_starts_no_thread() -> None:
    program = (
        "import sys, threading, mmspec.media\n"
        "heavy = {'torch', 'av', 'httpx', 'transformers', 'torchvision'} & set(sys.modules)\n"
        "sys.exit(f'{heavy} {threading.enumerate()}' if heavy or threading.active_count() > 1 else 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_image_grid_arranges_images_row_by_row_on_white() -> None:
    colours = [(200, 0, 0), (0, 200, 0), (0, 0, 200)]
    images = [Image.new("RGB", (4, 3), colour) for colour in colours]
    grid = image_grid(images)
    assert grid.size == (8, 6) and grid.mode == "RGB"
    assert [grid.getpixel(place) for place in ((0, 0), (4, 0), (0, 3))] == colours
    assert grid.getpixel((7, 5)) == (255, 255, 255)
    assert image_grid(images, columns=1).size == (4, 9) and image_grid(images, columns=9).size == (12, 3)
    assert image_grid([images[0], Image.new("L", (6, 1))]).size == (12, 3)
    assert mmspec.image_grid is image_grid


@pytest.mark.parametrize(
    ("images", "columns", "expected"),
    [
        ([], None, "^images must be a list"),
        (5, None, "^images must be a list"),
        ([5], None, r"^images\[0\] must be a PIL image; got 5"),
        *[([Image.new("L", (1, 1))], columns, "^columns must be a positive integer") for columns in (0, 1.5)],
    ],
)
def test_image_grid_refuses_other_arguments(images: object, columns: object, expected: str) -> None:
    with pytest.raises(InputError, match=expected):
        image_grid(images, columns)
