"""Limits of images, videos and downloads, and the words of a refusal."""

from __future__ import annotations

import math
from dataclasses import dataclass, fields

from mmspec.errors import MediaError
from mmspec.validation import is_number

__all__ = ["DEFAULT_LIMITS", "Described", "MediaLimits", "check_size"]


@dataclass(frozen=True)
class MediaLimits:
    """Limits that every function of `mmspec.media` keeps; each refusal names the field to raise.

    The defaults bound the memory for one image by about 0.4 GB and refuse every known decompression bomb
    from its header alone. `dataclasses.replace(limits, max_pixels=...)` changes one of them.

    Args:
        max_bytes: size of one image as a file, as bytes or in a `data:` URL.
        max_pixels: width x height of one image or of one video frame (2**25: 100 MB as RGB).
        max_aspect: long side over short side; the image processors of Qwen-VL refuse more than 200.
        max_video_bytes: size of one video as a file or as bytes.
        max_video_seconds: length of one video.
        max_frames: frames taken from one video.
        max_video_pixels: frames taken x width x height (2**28: 805 MB as RGB).
        max_fetch_bytes: bytes read from one URL.
        connect_timeout_s: seconds to connect to a server, and again for the TLS handshake.
        fetch_timeout_s: seconds for one URL, name lookup and body included (the lookup itself cannot be
            interrupted).
        decode_timeout_s: seconds after which the process that decodes a video is killed.
        decode_memory_bytes: address space of that process; the decoding library alone takes about 250 MB of
            it.

    Raises:
        MediaError: a limit that is not a positive number.
    """

    max_bytes: int = 20_000_000
    max_pixels: int = 2**25
    max_aspect: float = 200
    max_video_bytes: int = 20_000_000
    max_video_seconds: float = 600
    max_frames: int = 256
    max_video_pixels: int = 2**28
    max_fetch_bytes: int = 20_000_000
    connect_timeout_s: float = 5
    fetch_timeout_s: float = 15
    decode_timeout_s: float = 10
    decode_memory_bytes: int = 2**30

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if not is_number(value) or not 0 < value < math.inf:
                raise MediaError(field.name, value, "a limit is a finite number above 0")

    def allows(self, name: str, unit: str) -> str:
        """Say what is allowed, and how to allow more: the `allowed` phrase of a `MediaError`."""
        return f"at most {getattr(self, name):,} {unit}; MediaLimits({name}=...) raises this limit"


DEFAULT_LIMITS = MediaLimits()


class Described:
    """Description of a received value, for messages that should not echo it: its `repr` is the text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def check_size(width: int, height: int, what: str, *, argument: str, limits: MediaLimits) -> None:
    """Refuse an image by its size in pixels and its aspect ratio, before anything is decoded.

    Args:
        width, height: columns and rows.
        what: what has this size, with its article ("a PNG image").
        argument: the argument that the error names.
        limits: `max_pixels` and `max_aspect` apply.

    Raises:
        MediaError: no pixels, or more than a limit allows.
    """
    size = Described(f"{what} of {width:,} x {height:,} pixels")
    if width < 1 or height < 1:
        raise MediaError(argument, size, "width and height are at least 1")
    if max(width, height) > limits.max_aspect * min(width, height):
        raise MediaError(argument, size, limits.allows("max_aspect", "times as long as it is short"))
    if width * height > limits.max_pixels:
        raise MediaError(argument, size, limits.allows("max_pixels", "pixels"))
