"""Limits on images, videos, audio and downloads, and their error messages."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mmspec.errors import MediaError
from mmspec.validation import is_number

__all__ = ["DEFAULT_LIMITS", "Described", "MediaLimits", "check_size"]


@dataclass(frozen=True)
class MediaLimits:
    """Limits on the size of images, videos, audio and downloads.

    Every function of `mmspec.media` checks them, and an error names the field to raise. With the defaults,
    one image takes at most about 0.4 GB of memory, and every known decompression bomb is refused from its
    header. `dataclasses.replace(limits, max_pixels=...)` changes one limit.

    Args:
        max_bytes: bytes of one image as a file, in memory or in a `data:` URL.
        max_pixels: width x height of one image or video frame (2**25: 100 MB as RGB).
        max_aspect: ratio of the long side to the short side; Qwen-VL's image processors refuse more than 200.
        max_video_bytes: bytes of one video.
        max_video_seconds: duration of one video in seconds.
        max_frames: number of frames sampled from one video.
        max_video_pixels: sampled frames x width x height (2**28: 805 MB as RGB).
        max_audio_bytes: bytes of one audio file.
        max_audio_seconds: duration of one audio file in seconds.
        max_fetch_bytes: bytes downloaded from one URL.
        connect_timeout_s: seconds for connecting to a server, and again for the TLS handshake.
        fetch_timeout_s: seconds for one URL, including name lookup (which cannot be interrupted) and body.
        decode_timeout_s: seconds of processor time after which the process that decodes a video or audio is
            killed; it is also killed after 30 times as many seconds, the only limit on Windows.
        decode_memory_bytes: address space of that process in bytes; the decoding library alone takes about
            250 MB.

    Raises:
        MediaError: a limit is not a positive number.
    """

    max_bytes: int = 20_000_000
    max_pixels: int = 2**25
    max_aspect: float = 200
    max_video_bytes: int = 20_000_000
    max_video_seconds: float = 600
    max_frames: int = 256
    max_video_pixels: int = 2**28
    max_audio_bytes: int = 25_000_000
    max_audio_seconds: float = 3600
    max_fetch_bytes: int = 20_000_000
    connect_timeout_s: float = 5
    fetch_timeout_s: float = 15
    decode_timeout_s: float = 10
    decode_memory_bytes: int = 2**30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_number(value) or not 0 < value < math.inf:
                raise MediaError(field.name, value, "must be a finite number above 0")

    def rule(self, name: str, text: str) -> str:
        """Complete the rule of a `MediaError` with the value of a limit at "{}", and with how to raise it."""
        return f"{text.format(f'{getattr(self, name):,}')}; MediaLimits({name}=...) raises this limit"


DEFAULT_LIMITS = MediaLimits()


class Described:
    """Description of a received value for error messages; its `repr` is the text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def check_size(width: int, height: int, what: str, *, argument: str, limits: MediaLimits) -> None:
    """Check the size and the aspect ratio of an image before it is decoded.

    Args:
        width, height: size in pixels.
        what: description of the image with its article ("a PNG image").
        argument: name of the argument in error messages.
        limits: limits; `max_pixels` and `max_aspect` apply.

    Raises:
        MediaError: the image has no pixels or exceeds a limit.
    """
    size = Described(f"{what} of {width:,} x {height:,} pixels")
    if width < 1 or height < 1:
        raise MediaError(argument, size, "must be at least 1 pixel wide and high")
    if max(width, height) > limits.max_aspect * min(width, height):
        raise MediaError(argument, size, limits.rule("max_aspect", "must have an aspect ratio of at most {}"))
    if width * height > limits.max_pixels:
        raise MediaError(argument, size, limits.rule("max_pixels", "must have at most {} pixels"))
