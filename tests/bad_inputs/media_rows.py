"""Bad images and videos as data: rows 1 to 27. Rows 28 to 32, of URLs, are in tests/media/test_fetch.py."""

from __future__ import annotations

import base64
import io
import os
import socket
import threading
import time
import zlib
from collections.abc import Callable
from pathlib import Path
from types import FunctionType
from typing import Any

import numpy as np
from PIL import Image

from mmspec.errors import MediaError
from mmspec.media import load_image, load_images, load_video
from tests.bad_inputs.refusals import Row
from tests.media import files
from tests.media.files import clip, encoded, noise

CPU_SECONDS = 0.5  # generous: a refusal takes about a millisecond, but test machines are busy

HTML = b"<!DOCTYPE html><html><body>404</body></html>"
JPEG = encoded(noise(), "JPEG")
PNG = encoded(noise(), "PNG")
CLIP = clip()


def image(number: int, name: str, source: object, *expected: str, argument: str = "images") -> Row:
    make = source if isinstance(source, FunctionType) else lambda folder: source
    return Row(number, name, lambda folder: load_image(make(folder)), argument, expected)


def video(
    number: int, name: str, source: object, *expected: str, argument: str = "videos", **options: Any
) -> Row:
    make = source if isinstance(source, FunctionType) else lambda folder: source
    return Row(number, name, lambda folder: load_video(make(folder), **options), argument, expected)


def file(name: str, data: bytes) -> Callable[[Path], Path]:
    def make(folder: Path) -> Path:
        path = folder / name
        path.write_bytes(data)
        return path

    return make


def pipe(folder: Path) -> Path:
    os.mkfifo(folder / "pipe")
    return folder / "pipe"


def loop(folder: Path) -> Path:
    (folder / "loop").symlink_to(folder / "loop")
    return folder / "loop"


def unreadable(folder: Path) -> Path:
    server = socket.socket(socket.AF_UNIX)
    server.bind(str(folder / "s"))
    server.close()
    return folder / "s"


def closed(file: Any) -> Any:
    file.close()
    return file


def long_text_chunk() -> bytes:
    text = b"iTXtkey\0\1\0\0\0" + zlib.compress(bytes(100_000_000), 1)
    chunk = (len(text) - 4).to_bytes(4, "big") + text + zlib.crc32(text).to_bytes(4, "big")
    return PNG[:33] + chunk + PNG[33:]


def cut(data: bytes, percent: int) -> bytes:
    return data[: len(data) * percent // 100]


def data_url(data: bytes, media_type: str = "image/png") -> str:
    return f"data:{media_type};base64," + base64.b64encode(data).decode()


DAMAGED = "damaged, truncated or closed"
NOT_DECODED = "is damaged, truncated"
LAYOUTS = "[H, W], [H, W, C] or [C, H, W]"
SIZES = "at most 33,554,432 pixels; MediaLimits(max_pixels=...)"

NOT_SOURCES: list[object] = [
    None, "", 42, 10**5000, 1.5, True, [[1, 2]], [], {}, {"url": "x"}, object, (n for n in range(3))
]  # fmt: skip

IMAGES = [
    image(1, "empty file", file("a.png", b""), "a.png", "must not be an empty file"),
    image(1, "empty bytes", b"", "0 bytes"),
    image(2, "text as JPEG", file("a.jpg", b"hello\n"), "text data", "the formats JPEG, PNG, WEBP, GIF, BMP"),
    image(2, "HTML as PNG", file("a.png", b"\n " + HTML), "HTML data"),
    *[image(3, f"{kind} cut at {percent} %", cut(encoded(noise(), kind), percent), kind, "damaged")
      for kind in ("JPEG", "PNG", "WEBP", "GIF", "BMP") for percent in (10, 99)],
    image(3, "only a signature", JPEG[:3], "JPEG", "damaged"),
    image(4, "13,000 x 13,000", encoded(Image.new("1", (13000, 13000)), "PNG"), "13,000 x 13,000", SIZES),
    image(5, "30,000 x 30,000", files.png_header(30000, 30000), "30,000 x 30,000", SIZES),
    image(5, "GIF screen", files.gif_screen(65535, 65535), "65,535 x 65,535", SIZES),
    image(5, "BMP of negative width", files.bmp_header(-8, 8), "x 8 pixels"),
    image(6, "200,000 x 1", encoded(Image.new("1", (200000, 1)), "PNG"), "200,000 x 1", "at most 200",
          "max_aspect"),
    image(6, "2 x 500", encoded(Image.new("L", (2, 500)), "BMP"), "2 x 500", "max_aspect"),
    image(9, "floats in 0..255", np.full((2, 2), 200.0), "200..200", "floats in 0..1"),
    image(9, "PIL image of large floats", Image.new("F", (2, 2), 3), "3..3", "floats in 0..1"),
    image(10, "NaN", np.array([[0.0, np.nan]]), "without NaN and infinity"),
    image(11, "one dimension", np.zeros(5), "shape (5,)", LAYOUTS),
    image(11, "two channels", np.zeros((8, 8, 2)), "shape (8, 8, 2)", LAYOUTS),
    image(11, "integers above 255", np.array([[0, 256]]), "0..256", "integers in 0..255"),
    image(11, "empty array", np.zeros((0, 4, 3)), "4 x 0 pixels"),
    image(11, "complex array", np.zeros((2, 2), complex), "bool, integer or float"),
    image(11, "huge view", np.broadcast_to(np.uint8(0), (10**5, 10**5)), "100,000 x 100,000", SIZES),
    *[image(16, f"{name} file", data, f"{name} data", "the formats JPEG, PNG") for name, data in {
        "TIFF": b"II*\0\x08\0\0\0" + bytes(50), "FITS": b"SIMPLE  =                    T",
        "Photoshop": b"8BPS\0\1",
        "SVG": b'<?xml version="1.0"?><svg xmlns="http://www.w3.org/2000/svg"/>',
        "PostScript": b"%!PS-Adobe-3.0 EPSF",
        "gzip": b"\x1f\x8b\x08" + bytes(20), "PDF": b"%PDF-1.7", "ICO": b"\0\0\1\0" + bytes(20),
        "unknown": bytes(100),
        "HEIC or AVIF": b"\0\0\0\x20ftypavif" + bytes(20), "MP4": CLIP,
        "JPEG 2000": b"\0\0\0\x0cjP  \r\n\x87\n",
    }.items()],
    image(16, "text chunk of 100 MB", lambda folder: long_text_chunk(), "PNG", "damaged"),
    image(17, "data URL without comma", "data:image/png;base64" + "A" * 1000, "have a comma"),
    image(17, "data URL of bad base64", "data:image/png;base64,****", "valid base64"),
    image(17, "data URL of HTML", data_url(HTML, "text/html"), "starts with image/"),
    image(17, "data URL of HTML called PNG", data_url(HTML), "HTML data"),
    image(17, "empty data URL", "data:image/png;base64,", "0 bytes"),
    image(17, "data URL of 50 MB", lambda folder: "data:image/png;base64," + "A" * 50_000_000, "50,000,022",
          "max_bytes"),
    image(17, "bytes of 21 MB", lambda folder: bytes(21_000_000), "21,000,000 bytes",
          "at most 20,000,000 bytes", "max_bytes"),
    image(17, "file of 21 MB", file("a.png", bytes(21_000_000)), "21,000,000 bytes", "max_bytes"),
    image(18, "missing file", "/no/such/file.png", "'/no/such/file.png'", "no such file"),
    image(18, "folder", lambda folder: folder, "not of a folder"),
    image(18, "device", "/dev/zero", "'/dev/zero'", "device, pipe or socket"),
    image(18, "named pipe", pipe, "device, pipe or socket"),
    image(18, "socket", unreadable, "device, pipe or socket"),
    image(18, "symlink loop", loop, "cannot be read"),
    image(18, "NUL in the path", "a\0.png", "invalid file name"),
    image(18, "path of 5,000 characters", "x" * 5000, "(5000 characters)", "cannot be read"),
    *[image(19, f"object {i}: {type(thing).__name__}", thing, "must be a path, bytes")
      for i, thing in enumerate(NOT_SOURCES)],
    Row(19, "empty list", lambda folder: load_images([]), "images", ("at least one image",)),
    Row(19, "list in a list", lambda folder: load_images([noise(), [noise()]]), "images[1]", ("class list",)),
    Row(19, "dictionary in place of a list", lambda folder: load_images({"a": 1}), "images", ("keys 'a'",)),
    image(19, "base64 that is cut", lambda folder: base64.b64encode(PNG).decode()[:-3], "valid base64"),
    image(19, "no base64", {"base64": "/etc/hostname!"}, "valid base64"),
    image(19, "dict of two images", {"path": "a.png", "url": "b.png"}, "one of the keys bytes, base64"),
    image(19, "dict with another key", {"path": "a.png", "size": 3}, "one of the keys bytes, base64"),
    image(19, "closed buffer", lambda folder: closed(io.BytesIO(PNG)), "a BytesIO", "closed"),
    image(20, "closed image", lambda folder: closed(noise()), "a PIL image", DAMAGED),
]  # fmt: skip

VIDEOS = [
    video(21, "empty", file("a.mp4", b""), "must not be an empty file"),
    video(21, "playlist", b"#EXTM3U\n#EXTINF:1,\nfile:///etc/passwd\n", "HLS playlist data",
          "the formats MP4"),
    video(21, "image", PNG, "PNG data", "the formats MP4"),
    video(21, "number", 42, "class int", "list or array of frames"),
    video(22, "MP4 without index", cut(CLIP, 50), "truncated"),
    video(22, "MP4 cut in the last bytes", CLIP[:-400], NOT_DECODED),
    video(23, "sound only", files.sound_only(), "a video stream"),
    video(23, "header of nothing", CLIP[:32], "MP4 data"),
    video(24, "21 MB", lambda folder: CLIP + bytes(21_000_000), "at most 20,000,000 bytes",
          "max_video_bytes"),
    video(24, "601 seconds", clip(2, times_ms=(0, 601_000)), "601.0 seconds", "at most 600 seconds",
          "max_video_seconds"),
    video(24, "300 frames", clip(300, (16, 16)), "300 frames", "at most 256 frames", "max_frames", fps=10),
    video(24, "promises 10^9 frames", files.claims_frames(CLIP, 10**9), "MP4 data"),
    video(24, "GIF of 65,535 x 65,535", files.gif_screen(65535, 65535), "65,535 x 65,535", SIZES),
    video(24, "Frame above max_pixels", np.broadcast_to(np.uint8(0), (2, 6000, 6000, 3)), SIZES,
          argument="videos[0]"),
    video(24, "too many pixels in all", np.broadcast_to(np.uint8(0), (250, 1100, 1100, 3)),
          "max_video_pixels"),
    video(26, "different sizes", [noise(8, 6), noise(8, 6), noise(9, 6)], "9 x 6", "8 x 6",
          argument="videos[2]"),
    video(26, "bad frame", [noise(8, 6), None], "None", argument="videos[1]"),
    video(26, "no frames", [], "at least one frame"),
    video(26, "array of one frame's shape", np.zeros((4, 4, 3)), "[T, H, W, C]"),
    video(26, "10^9 frames", np.broadcast_to(np.uint8(0), (10**9, 2, 2, 3)), "1,000,000,000 frames",
          num_frames=None),
    *[video(27, f"num_frames={n!r}"[:30], CLIP, "at most 256", argument="num_frames", num_frames=n)
      for n in (0, 1.5, "8", True, 257)],
    video(27, "num_frames above the total", CLIP, "at most 12, the frames", argument="num_frames",
          num_frames=13),
    *[video(27, f"fps {i}: {type(r).__name__}", CLIP, "above 0 and at most", argument="fps", fps=r)
      for i, r in enumerate((0, float("nan"), "2", True, 10**5000))],
    video(27, "fps above the video's", CLIP, "at most 10, the frame rate", argument="fps", fps=11),
    video(27, "fps of a list", [noise(8, 6)], "a list of frames", argument="fps", fps=1),
    video(27, "both", CLIP, "combined with num_frames", argument="fps", num_frames=1, fps=1),
]  # fmt: skip

ROWS = [*IMAGES, *VIDEOS]


def problems(row: Row, folder: Path) -> list[str]:
    """Try one row, and return the problems of its refusal."""
    os.environ.pop("HF_HUB_OFFLINE", None)
    threads = threading.active_count()
    start = time.process_time()
    try:
        row.call(folder)
    except MediaError as error:
        seconds = time.process_time() - start
        message = str(error)
        found = [f"lacks {fragment!r}" for fragment in row.expected if fragment not in message]
        if error.argument != row.argument or not message.startswith(f"{row.argument} "):
            found.append(f"names {error.argument!r}, not {row.argument!r}")
        if len(message) >= 400:
            found.append(f"has {len(message)} characters")
        if seconds > CPU_SECONDS:
            found.append(f"took {seconds:.2f} s")
        if threading.active_count() > threads:
            found.append("left a thread behind")
        return [f"{row}: {problem}: {message[:500]}" for problem in found]
    except Exception as error:  # noqa: BLE001  any other class is exactly what this looks for
        return [f"{row}: {type(error).__name__}: {str(error)[:200]}"]
    return [f"{row}: accepted"]
