"""Reading of paths, base64, `data:` URLs and http(s) URLs as bytes, within size limits."""

from __future__ import annotations

import base64
import binascii
import io
import os
import re
import stat
import urllib.parse
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mmspec.errors import MediaError
from mmspec.media.fetch import fetch
from mmspec.media.limits import Described, MediaLimits

__all__ = ["file_format", "read_source"]

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")  # two letters at least, since C:// is a drive
OpenFile = io.BytesIO | io.BufferedReader | io.BufferedRandom  # as `open(path, "rb")` and "r+b" return

_ACCEPTED = "must be a path, bytes, an open binary file, base64, a data: URL or an https:// URL"
_ARRAYS = {
    "image": "a PIL image, array or tensor",
    "video": "a list or array of frames",
    "audio": 'samples with their rate, as {"array": ..., "sampling_rate": ...}',
}

# Name -> first bytes. Unsupported formats are listed for error messages.
_SIGNATURES = {
    "JPEG": (b"\xff\xd8\xff",),
    "PNG": (b"\x89PNG\r\n\x1a\n",),
    "GIF": (b"GIF87a", b"GIF89a"),
    "BMP": (b"BM",),
    "TIFF": (b"II*\x00", b"MM\x00*", b"II+\x00", b"MM\x00+"),
    "PDF": (b"%PDF",),
    "PostScript": (b"%!PS", b"\xc5\xd0\xd3\xc6"),
    "Photoshop": (b"8BPS",),
    "FITS": (b"SIMPLE  =",),
    "ICO": (b"\x00\x00\x01\x00",),
    "JPEG 2000": (b"\x00\x00\x00\x0cjP  ",),
    "JPEG XL": (b"\xff\x0a",),
    "Matroska or WebM": (b"\x1aE\xdf\xa3",),
    "HLS playlist": (b"#EXTM3U",),
    "Ogg": (b"OggS",),
    "MP3": (b"ID3", b"\xff\xfb", b"\xff\xfa", b"\xff\xf3", b"\xff\xf2"),
    "AAC": (b"\xff\xf1", b"\xff\xf9"),
    "FLAC": (b"fLaC",),
    "ZIP": (b"PK\x03\x04",),
    "gzip": (b"\x1f\x8b",),
}
_RIFF_FORMATS = {b"WEBP": "WEBP", b"AVI ": "AVI", b"WAVE": "WAV"}
_STILL_BRANDS = {b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1"}
# Formats of bare base64, recognised by its first characters.
_IMAGES = {"JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "HEIC or AVIF"}
_MEDIA = _IMAGES | {"MP4", "Matroska or WebM", "AVI", "WAV", "FLAC", "Ogg", "MP3"}
_HEAD = 24  # characters of base64 (18 bytes) that identify a format
SPARE = 1000  # characters of base64 for line breaks; the decoded size is checked exactly later
_KEYS = ("bytes", "base64", "path", "url")  # keys of a dict, in order of precedence


def file_format(data: bytes) -> str:
    """Return the format of a file from its first bytes ("PNG", "HTML", "MP4", "text", "unknown", ...)."""
    for name, signatures in _SIGNATURES.items():
        if data.startswith(signatures):
            return name
    if data.startswith(b"RIFF"):
        return _RIFF_FORMATS.get(data[8:12], "RIFF")
    if data[4:8] in (b"ftyp", b"moov", b"mdat", b"wide", b"free", b"skip"):
        return "HEIC or AVIF" if data[8:12] in _STILL_BRANDS else "MP4"
    head = data[:512].lstrip(b"\xef\xbb\xbf \t\r\n").lower()
    if b"<svg" in head:
        return "SVG"
    if head.startswith((b"<!doctype html", b"<html", b"<head", b"<body")):
        return "HTML"
    if head.startswith(b"<?xml"):
        return "XML"
    is_text = not any(byte < 9 or 13 < byte < 32 or byte == 127 for byte in data[:512])
    return "text" if is_text else "unknown"


def read_source(source: object, *, argument: str, limits: MediaLimits, max_bytes: str, kind: str) -> bytes:
    """Read an image, a video or audio as bytes.

    Args:
        source: a path (str or Path), bytes, an open binary file, a `data:` URL, an http(s) URL, or base64
            text; or a dict with one of these under "path", "bytes", "url" or "base64". A string is a path
            if the file exists, and else base64 if it starts like an encoded image, video or audio file.
        argument, limits: as in `load_image`.
        max_bytes: field of `limits` for the size: "max_bytes", "max_video_bytes" or "max_audio_bytes".
        kind: "image", "video" or "audio"; a `data:` URL must declare a media type of this kind.

    Raises:
        MediaError: the source is of an unsupported kind, unreadable, empty, or too large.
    """
    size_rule = limits.rule(max_bytes, "must have at most {} bytes")
    most = getattr(limits, max_bytes)
    is_base64 = False
    if isinstance(source, Mapping):
        source, is_base64 = _entry(source, argument)
    if isinstance(source, OpenFile):
        source = _content(source, argument, most)
    if isinstance(source, str) and source[:5].lower() == "data:":
        data = _read_data_url(source, argument, kind, most, size_rule)
    elif isinstance(source, str) and (is_base64 or _is_bare_base64(source)):
        data = _read_base64(source, argument, most, size_rule, "must be valid base64")
    elif isinstance(source, str) and _URL.match(source):
        data = fetch(source, argument=argument, limits=limits)
    elif isinstance(source, str | Path):
        data = _read_file(source, argument, most, size_rule)
    elif isinstance(source, bytes | bytearray | memoryview) and not is_base64:
        size = source.nbytes if isinstance(source, memoryview) else len(source)
        if size > most:
            raise MediaError(argument, Described(f"{size:,} bytes"), size_rule)
        data = bytes(source)
    else:
        found = "None" if source is None else f"an object of class {type(source).__name__}"
        if isinstance(source, Mapping):
            found = f"a dict with the keys {', '.join(map(repr, source))}"
        raise MediaError(argument, Described(found), f"{_ACCEPTED}, or {_ARRAYS[kind]}")
    if not data:
        raise MediaError(argument, Described("0 bytes"), "must not be empty")
    if len(data) > most:
        raise MediaError(argument, Described(f"{len(data):,} bytes"), size_rule)
    return data


def _entry(source: Mapping[Any, Any], argument: str) -> tuple[object, bool]:
    """Return the image, video or audio of a dict, and whether it is base64; `bytes` precede `path`."""
    given = [key for key in _KEYS if source.get(key) is not None]
    if not given:
        return source, False  # refused later, like any unsupported object
    if not set(source) <= set(_KEYS) or len(given) > 1 + (given == ["bytes", "path"]):
        raise MediaError(argument, list(source), f"must be a dict with one of the keys {', '.join(_KEYS)}")
    value = source[given[0]]
    if given[0] != "base64":
        return value, False
    return value.decode("latin-1") if isinstance(
        value, bytes
    ) else value, True  # the type that b64encode returns


def _content(file: OpenFile, argument: str, most: int) -> memoryview | bytes:
    """Return the whole content of an open file, or one byte more than allowed, and keep its position."""
    try:
        if isinstance(file, io.BytesIO):
            return file.getbuffer()
        place = file.tell()
        file.seek(0)
        data = file.read(most + 1)
        file.seek(place)
        return data
    except (OSError, ValueError) as error:  # ValueError: it is closed; OSError: a pipe, for example
        rule = "must not be closed" if file.closed else "must be a file that can be read from its start"
        raise MediaError(argument, Described(f"a {type(file).__name__}"), rule) from error


def _is_bare_base64(text: str) -> bool:
    """Whether a text starts like the base64 of an image, a video or audio, and is not the path of a file."""
    head = "".join(text[: 2 * _HEAD].split())[:_HEAD]
    try:
        name = file_format(base64.b64decode(head, validate=True)) if len(head) == _HEAD else "text"
    except ValueError:
        return False
    return name in _MEDIA and not os.path.exists(text)


def _read_base64(text: str, argument: str, most: int, size_rule: str, rule: str) -> bytes:
    if len(text) > most * 4 // 3 + SPARE:
        raise MediaError(argument, Described(f"base64 of {len(text):,} characters"), size_rule)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(argument, text, rule) from error


def _read_file(path: str | Path, argument: str, most: int, size_rule: str) -> bytes:
    if not str(path):
        raise MediaError(argument, "", _ACCEPTED)
    try:
        # Checked before it is opened: opening a tape rewinds it, and opening a named pipe blocks.
        _check_regular(os.stat(path), path, argument)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)  # again, since the name may have changed its target
            _check_regular(status, path, argument)
            if status.st_size > most:
                raise MediaError(argument, Described(f"a file of {status.st_size:,} bytes"), size_rule)
            return file.read(most + 1)
    except FileNotFoundError as error:
        raise MediaError(argument, str(path), f"{_ACCEPTED}; there is no such file") from error
    except MediaError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, or a lone surrogate
        reason = error.strerror if isinstance(error, OSError) else "invalid file name"
        raise MediaError(argument, str(path), f"cannot be read: {reason}") from error


def _check_regular(status: os.stat_result, path: str | Path, argument: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise MediaError(argument, str(path), "must be the path of one file, not of a folder")
    if not stat.S_ISREG(status.st_mode):
        raise MediaError(argument, str(path), "must be a regular file, not a device, pipe or socket")
    if status.st_size == 0:
        raise MediaError(argument, str(path), "must not be an empty file")


def _read_data_url(url: str, argument: str, kind: str, most: int, size_rule: str) -> bytes:
    # Percent-encoding takes 3 characters per byte; a cheap bound before anything is copied.
    if len(url) > most * 4:
        raise MediaError(argument, Described(f"a data: URL of {len(url):,} characters"), size_rule)
    header, comma, body = url[5:].partition(",")
    if not comma:
        raise MediaError(argument, url, f"must have a comma, as in data:{kind}/...;base64,...")
    media_type, *parameters = (part.strip().lower() for part in header.split(";"))
    if not media_type.startswith(f"{kind}/"):
        raise MediaError(argument, url, f"must be a data: URL whose media type starts with {kind}/")
    if "base64" not in parameters:
        return urllib.parse.unquote_to_bytes(body)
    if len(body) > most * 4 // 3 + SPARE:
        raise MediaError(argument, Described(f"a data: URL of {len(url):,} characters"), size_rule)
    rule = "must have valid base64 after the comma"
    return _read_base64(urllib.parse.unquote(body), argument, most, size_rule, rule)
