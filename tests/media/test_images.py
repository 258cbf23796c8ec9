"""Every kind of image that is accepted, by exact pixel values; and fuzzed files."""

from __future__ import annotations

import base64
import dataclasses
import io
import math
import os
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

from mmspec.errors import MediaError
from mmspec.media import MediaLimits, load_image, load_images
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
    with pytest.raises(MediaError, match=r"base64 of 40,000,000 characters; at most 20,000,000 bytes"):
        load_image({"base64": "A" * 40_000_000})


def test_every_format_is_accepted() -> None:
    flat = Image.new("RGB", (8, 6), (200, 40, 90))
    for format in FORMATS:  # JPEG and WEBP lose a little
        assert np.abs(pixels(encoded(flat, format)).astype(int) - (200, 40, 90)).max() <= 6
    assert pixels(encoded(Image.new("RGB", (1, 1), (1, 2, 3)), "PNG")).tolist() == [[[1, 2, 3]]]


def test_sixteen_bit_grey_is_scaled_and_not_clipped() -> None:
    values = np.array([[0, 257, 128 * 257, 65535, 128, 129]], np.uint16)
    expected = [0, 1, 128, 255, 0, 1]
    assert pixels(encoded(Image.fromarray(values), "PNG"))[0, :, 0].tolist() == expected
    assert pixels(values)[0, :, 0].tolist() == expected
    assert pixels(Image.fromarray(values))[0, :, 0].tolist() == expected
    assert pixels(torch.tensor(values.astype(np.int32)).to(torch.uint16))[0, :, 0].tolist() == expected


def test_floats_in_zero_to_one_are_scaled_once() -> None:
    for dtype in (np.float16, np.float32, np.float64):
        values = np.array([[0, 0.5, 1, 1 / 255]], dtype)
        for same in (values, torch.from_numpy(values), Image.fromarray(values.astype(np.float32))):
            assert pixels(same)[0, :, 0].tolist() == [0, 128, 255, 1]
    tensor = torch.ones(3, 2, 4, dtype=torch.bfloat16, requires_grad=True)
    assert pixels(tensor).shape == (2, 4, 3) and pixels(tensor).min() == 255


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


DAMAGED_EXIF = [
    b"Exif\0\0garbage",
    b"Exif\0\0II*\0\xff\xff\xff\xff",
    b"Exif\0\0II*\0\x08\0\0\0\xff\xff\x12\x01\x03\0",
    b"Exif\0\0MM\0*\0\0\0\x08\0\x01\x01\x12\0\x02\0\0\0\x04abcd",
]


def test_damaged_exif_is_ignored_without_a_warning() -> None:
    for exif in DAMAGED_EXIF:
        data = encoded(Image.new("RGB", (8, 6), "white"), "JPEG", exif=exif)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            assert pixels(data).shape == (6, 8, 3)


def test_colour_models_follow_pillow() -> None:
    assert pixels(encoded(Image.new("CMYK", (8, 8), (0, 255, 255, 0)), "JPEG"))[0, 0].tolist() == [255, 0, 0]
    for mode in ("1", "L", "P", "YCbCr", "HSV", "CMYK"):
        image = IMAGE.convert(mode)
        assert np.array_equal(pixels(image), np.asarray(image.convert("RGB")))


@pytest.mark.parametrize("format", ["GIF", "WEBP", "PNG"])
def test_only_the_first_frame_of_an_animation_is_read(format: str) -> None:
    frames = [Image.new("RGB", (8, 6), colour) for colour in ("red", "blue", "lime")]
    options = {"lossless": True} if format == "WEBP" else {}
    data = encoded(frames[0], format, save_all=True, append_images=frames[1:], duration=100, **options)
    assert pixels(data)[0, 0].tolist() == [255, 0, 0]
    if format != "WEBP":  # what follows the first frame is not even looked at; WEBP states its total length
        assert pixels(data[:-30])[0, 0].tolist() == [255, 0, 0]
    image = Image.open(io.BytesIO(data))  # and the current one of an image of PIL
    image.seek(2)
    assert pixels(image)[0, 0].tolist() == [0, 255, 0]


def test_the_result_is_an_own_copy(tmp_path: Path) -> None:
    original = IMAGE.copy()
    array = np.array(original)
    from_image, from_array = load_image(original), load_image(array)
    original.putpixel((0, 0), (7, 7, 7))
    array[:] = 7
    for loaded in (from_image, from_array):
        assert np.array_equal(np.asarray(loaded), np.asarray(IMAGE))

    path = tmp_path / "deleted.png"
    IMAGE.save(path)
    lazy = Image.open(path)
    os.unlink(path)
    assert np.array_equal(pixels(lazy), np.asarray(IMAGE))
    loaded_from_file = load_image(encoded(IMAGE, "PNG"))
    loaded_from_file.putpixel((0, 0), (1, 1, 1))  # not read-only


def test_lists_name_the_place_of_the_bad_one() -> None:
    assert [image.size for image in load_images([IMAGE, np.zeros((2, 3))])] == [(8, 6), (3, 2)]
    assert len(load_images(IMAGE)) == 1
    with pytest.raises(MediaError, match=r"^images\[2\]: got 'missing.png'") as caught:
        load_images((IMAGE, IMAGE, "missing.png"), argument="images")
    assert caught.value.argument == "images[2]"


def test_limits_can_be_raised_and_lowered() -> None:
    with pytest.raises(MediaError, match=r"8 x 6 pixels; at most 47 pixels; MediaLimits\(max_pixels"):
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


@pytest.mark.slow
@pytest.mark.parametrize("name", [*FORMATS, "animated", "palette"])
def test_twenty_thousand_mutated_files_raise_nothing_but_media_errors(
    name: str, seeds: dict[str, bytes]
) -> None:
    random, data = np.random.default_rng(0), seeds[name]
    for _ in range(20_000):
        count = int(random.integers(1, 9))
        edits = list(zip(random.integers(0, len(data), count), random.integers(0, 256, count), strict=True))
        accept_or_refuse(mutate(data, edits, int(random.integers(0, 30)) if random.random() < 0.2 else 0))


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


def test_limits_are_positive_numbers() -> None:
    for field in (field.name for field in dataclasses.fields(MediaLimits)):
        for value in (0, -1, math.nan, math.inf, True, "10", None):
            with pytest.raises(MediaError, match=f"^{field}: "):
                MediaLimits(**{field: value})  # type: ignore[arg-type]
        assert getattr(MediaLimits(**{field: 7}), field) == 7
