"""Small images and clips for the tests, and ways to spoil them."""

from __future__ import annotations

import io
import struct
import zlib
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

import av
import numpy as np
from PIL import Image

ONE = 1 << 16


def encoded(image: Image.Image, format: str, **options: Any) -> bytes:
    """The image as a file."""
    buffer = io.BytesIO()
    image.save(buffer, format, **options)
    return buffer.getvalue()


def noise(width: int = 64, height: int = 48, seed: int = 0) -> Image.Image:
    """An image that compresses badly, so that a cut takes something away."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    return Image.fromarray(pixels)


def clip(
    num_frames: int = 12,
    size: tuple[int, int] = (64, 48),
    *,
    times_ms: Sequence[int] | None = None,
    container: str = "mp4",
    gop: int = 12,
) -> bytes:
    """A clip whose frame i has brightness 20 * i (mod 240) in its upper half and 255 in its lower left
    quarter.

    Args:
        num_frames: how many, at ten a second.
        size: (width, height).
        times_ms: when each frame is shown instead, in milliseconds.
        container: FFmpeg's name of the format.
        gop: distance of key frames.
    """
    width, height = size
    times = range(0, 100 * num_frames, 100) if times_ms is None else times_ms
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream("mpeg4", rate=10 if times_ms is None else 1000)
        stream.width, stream.height, stream.pix_fmt = width, height, "yuv420p"
        stream.codec_context.gop_size = gop
        stream.codec_context.qmin = stream.codec_context.qmax = 1
        stream.codec_context.bit_rate = 10_000_000
        for index, time in enumerate(times):
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[: height // 2] = brightness(index)
            pixels[height // 2 :, : width // 2] = 255
            frame = av.VideoFrame.from_ndarray(pixels, format="rgb24")
            frame.pts, frame.time_base = time, Fraction(1, 1000)
            file.mux(stream.encode(frame))
        file.mux(stream.encode())
    return buffer.getvalue()


def brightness(index: int) -> int:
    """Brightness of the upper half of frame `index` of a clip."""
    return 20 * index % 240


def tone(rate: int = 16_000, seconds: float = 0.5, hertz: float = 440) -> np.ndarray:
    """A sine of amplitude 0.5, float32 [n]."""
    times = np.arange(round(rate * seconds)) / rate
    return np.asarray(0.5 * np.sin(2 * np.pi * hertz * times), np.float32)


def sound(
    samples: np.ndarray, rate: int = 16_000, *, container: str = "wav", codec: str = "pcm_s16le"
) -> bytes:
    """An audio file of samples, float32 [n] or [2, n]."""
    channels = np.atleast_2d(samples)
    layout = ("mono", "stereo")[len(channels) - 1]
    buffer = io.BytesIO()
    with av.open(buffer, "w", format=container) as file:
        stream: Any = file.add_stream(codec, rate=rate, layout=layout)
        resampler = av.AudioResampler(
            format=stream.format, layout=layout, rate=rate, frame_size=stream.frame_size
        )
        frame: Any = av.AudioFrame.from_ndarray(np.ascontiguousarray(channels), format="fltp", layout=layout)
        frame.sample_rate = rate
        for each in [*resampler.resample(frame), *resampler.resample(None)]:
            file.mux(stream.encode(each))
        file.mux(stream.encode())
    return buffer.getvalue()


def sound_only() -> bytes:
    """An MP4 file without images."""
    return sound(np.zeros(1024, np.float32), container="mp4", codec="aac")


def laid(data: bytes, matrix: tuple[int, int, int, int], *, by_movie: bool = False) -> bytes:
    """An MP4 file with (a, b, c, d) in the display matrix of its track, or of the whole movie."""
    a, b, c, d = (ONE * number for number in matrix)
    start = data.index(b"mvhd") + 40 if by_movie else data.index(b"tkhd") + 44
    return data[:start] + struct.pack(">9i", a, b, 0, c, d, 0, 0, 0, 1 << 30) + data[start + 36 :]


def cut(data: bytes, start_ms: int, stop_ms: int) -> bytes:
    """An MP4 file of `clip` of which an edit list shows what is between two times."""
    place = data.index(b"elst") + 12
    edit = struct.pack(">ii", stop_ms - start_ms, start_ms * 10240 // 1000)
    return data[:place] + edit + data[place + 8 :]


def claims_frames(data: bytes, count: int) -> bytes:
    """An MP4 file whose tables promise `count` frames of 7 bytes each."""
    start = data.index(b"stsz") + 8
    data = data[:start] + struct.pack(">ii", 7, count) + data[start + 8 :]
    start = data.index(b"stts") + 12
    return data[:start] + struct.pack(">i", count) + data[start + 4 :]


def fading_gif(durations_ms: Sequence[int], size: tuple[int, int] = (20, 10)) -> bytes:
    """An animated GIF whose frame i is grey of value 20 * i."""
    frames = [Image.new("L", size, brightness(i)) for i in range(len(durations_ms))]
    options = {"save_all": True, "append_images": frames[1:], "duration": list(durations_ms)}
    return encoded(frames[0], "GIF", **options)


def webp_canvas(width: int, height: int) -> bytes:
    """A WEBP file of one tiny image whose header asks for a canvas of this size."""
    tiny = encoded(Image.new("RGBA", (8, 8)), "WEBP", lossless=True)[12:]
    sides = (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    body = b"WEBPVP8X" + struct.pack("<I", 10) + b"\x10\0\0\0" + sides + tiny
    return b"RIFF" + struct.pack("<I", len(body)) + body


def gif_screen(width: int, height: int) -> bytes:
    """A GIF file whose screen has this size."""
    data = bytearray(encoded(Image.new("L", (8, 8)), "GIF"))
    data[6:10] = struct.pack("<HH", width, height)
    return bytes(data)


def png_header(width: int, height: int) -> bytes:
    """A PNG file of 8-bit grey that ends where its pixels should start."""
    chunk = b"IHDR" + struct.pack(">IIBBBBB", width, height, 8, 0, 0, 0, 0)
    checked = struct.pack(">I", 13) + chunk + struct.pack(">I", zlib.crc32(chunk))
    return b"\x89PNG\r\n\x1a\n" + checked + struct.pack(">I", 10) + b"IDAT" + bytes(10)


def bmp_header(width: int, height: int) -> bytes:
    """A BMP file of a header and no pixels."""
    data = bytearray(encoded(Image.new("RGB", (8, 8)), "BMP"))[:54]
    data[18:26] = struct.pack("<ii", width, height)
    return bytes(data)
