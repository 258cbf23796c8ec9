"""Read a path, base64, `data:` URL or address as bytes, without blocking and never more than is allowed."""

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

_URL = re.compile(r"[a-zA-Z][a-zA-Z0-9+.-]+://")  # two letters at least: C:// is a drive
_ACCEPTED = "pass a path, bytes, base64, a data: URL or an https:// URL"
_PIXELS = {"image": "a PIL image, array or tensor", "video": "a list or array of frames"}

# Name -> first bytes. Formats that we refuse are here too, so that a refusal can say what the file really is.
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
    "MP3": (b"ID3",),
    "ZIP": (b"PK\x03\x04",),
    "gzip": (b"\x1f\x8b",),
}
_RIFF_FORMATS = {b"WEBP": "WEBP", b"AVI ": "AVI", b"WAVE": "WAV"}
_STILL_BRANDS = {b"avif", b"avis", b"heic", b"heix", b"mif1", b"msf1"}
# Files that bare base64 may hold; the first characters must show one of them.
_MEDIA = {"JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF", "HEIC or AVIF", "MP4", "Matroska or WebM", "AVI"}
_HEAD = 24  # characters of base64 that show a format: 18 bytes
SPARE = 1000  # characters of base64 for line breaks; the decoded size is compared exactly later
_KEYS = ("bytes", "base64", "path", "url")  # of a dict, in the order in which they are taken


def file_format(data: bytes) -> str:
    """Name the format of a file by its first bytes ("PNG", "HTML", "MP4", "text", "unknown", ...)."""
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
    """Read an image or a video as bytes.

    Args:
        source: a path (str or Path), bytes, a `BytesIO`, a `data:` URL, an http(s) URL, or base64 text; or a
            dict with one of these under "path", "bytes", "url" or "base64". A string is the path of a file
            if there is such a file, and else base64 if it begins as an image or a video does.
        argument, limits: as of `load_image`.
        max_bytes: the field of `limits` that bounds the size: "max_bytes" or "max_video_bytes".
        kind: "image" or "video"; a `data:` URL must declare a media type of this kind.

    Raises:
        MediaError: not a kind of source that is known, unreadable, empty, or too large.
    """
    allowed = limits.allows(max_bytes, "bytes")
    most = getattr(limits, max_bytes)
    is_base64 = False
    if isinstance(source, Mapping):
        source, is_base64 = _entry(source, argument)
    if isinstance(source, io.BytesIO):
        source = _buffer(source, argument)
    if isinstance(source, str) and source[:5].lower() == "data:":
        data = _read_data_url(source, argument, kind, most, allowed)
    elif isinstance(source, str) and (is_base64 or _is_bare_base64(source)):
        data = _read_base64(source, argument, most, allowed, "this is not valid base64")
    elif isinstance(source, str) and _URL.match(source):
        data = fetch(source, argument=argument, limits=limits)
    elif isinstance(source, str | Path):
        data = _read_file(source, argument, most, allowed)
    elif isinstance(source, bytes | bytearray | memoryview) and not is_base64:
        size = source.nbytes if isinstance(source, memoryview) else len(source)
        if size > most:
            raise MediaError(argument, Described(f"{size:,} bytes"), allowed)
        data = bytes(source)
    else:
        found = "None" if source is None else f"an object of class {type(source).__name__}"
        raise MediaError(argument, Described(found), f"{_ACCEPTED}, or {_PIXELS[kind]}")
    if not data:
        raise MediaError(argument, Described("0 bytes"), "the file or body is empty")
    if len(data) > most:
        raise MediaError(argument, Described(f"{len(data):,} bytes"), allowed)
    return data


def _entry(source: Mapping[Any, Any], argument: str) -> tuple[object, bool]:
    """The image or video of a dict, and whether it is base64; of `bytes` and `path` the bytes are read."""
    given = [key for key in _KEYS if source.get(key) is not None]
    if not given:
        return source, False  # an object like any other that is refused
    if not set(source) <= set(_KEYS) or len(given) > 1 + (given == ["bytes", "path"]):
        raise MediaError(argument, list(source), f"a dict has one of the keys {', '.join(_KEYS)}")
    value = source[given[0]]
    if given[0] != "base64":
        return value, False
    return value.decode("latin-1") if isinstance(value, bytes) else value, True  # as b64encode gives it


def _buffer(file: io.BytesIO, argument: str) -> memoryview:
    """The content of a file in memory, wherever it was written to or read last."""
    try:
        return file.getbuffer()
    except ValueError as error:
        raise MediaError(argument, Described("a BytesIO"), "it is closed") from error


def _is_bare_base64(text: str) -> bool:
    """True for text that begins as the base64 of an image or a video does, and is no path of a file."""
    head = "".join(text[: 2 * _HEAD].split())[:_HEAD]
    try:
        name = file_format(base64.b64decode(head, validate=True)) if len(head) == _HEAD else "text"
    except ValueError:
        return False
    return name in _MEDIA and not os.path.exists(text)


def _read_base64(text: str, argument: str, most: int, allowed: str, wrong: str) -> bytes:
    if len(text) > most * 4 // 3 + SPARE:
        raise MediaError(argument, Described(f"base64 of {len(text):,} characters"), allowed)
    try:
        return base64.b64decode("".join(text.split()), validate=True)
    except (binascii.Error, ValueError) as error:
        raise MediaError(argument, text, wrong) from error


def _read_file(path: str | Path, argument: str, most: int, allowed: str) -> bytes:
    if not str(path):
        raise MediaError(argument, "", _ACCEPTED)
    try:
        # Looked at before it is opened: opening a tape rewinds it, opening a named pipe waits for its other
        # end.
        _check_regular(os.stat(path), path, argument)
        descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
        with open(descriptor, "rb") as file:
            status = os.fstat(descriptor)  # again, since the name may point elsewhere by now
            _check_regular(status, path, argument)
            if status.st_size > most:
                raise MediaError(argument, Described(f"a file of {status.st_size:,} bytes"), allowed)
            return file.read(most + 1)
    except FileNotFoundError as error:
        raise MediaError(argument, str(path), f"no such file; {_ACCEPTED}") from error
    except MediaError:
        raise
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name, or a lone surrogate
        reason = error.strerror if isinstance(error, OSError) else "not a possible file name"
        raise MediaError(argument, str(path), f"cannot be read: {reason}") from error


def _check_regular(status: os.stat_result, path: str | Path, argument: str) -> None:
    if stat.S_ISDIR(status.st_mode):
        raise MediaError(argument, str(path), "this is a folder; pass the path of one file")
    if not stat.S_ISREG(status.st_mode):
        allowed = "this is a device, pipe or socket; pass the path of a regular file"
        raise MediaError(argument, str(path), allowed)
    if status.st_size == 0:
        raise MediaError(argument, str(path), "the file is empty")


def _read_data_url(url: str, argument: str, kind: str, most: int, allowed: str) -> bytes:
    # Percent-encoding takes 3 characters a byte; a cheap bound before anything is copied.
    if len(url) > most * 4:
        raise MediaError(argument, Described(f"a data: URL of {len(url):,} characters"), allowed)
    header, comma, body = url[5:].partition(",")
    if not comma:
        raise MediaError(argument, url, f"a data: URL has a comma: data:{kind}/...;base64,...")
    media_type, *parameters = (part.strip().lower() for part in header.split(";"))
    if not media_type.startswith(f"{kind}/"):
        raise MediaError(argument, url, f"the media type of this data: URL must start with {kind}/")
    if "base64" not in parameters:
        return urllib.parse.unquote_to_bytes(body)
    if len(body) > most * 4 // 3 + SPARE:
        raise MediaError(argument, Described(f"a data: URL of {len(url):,} characters"), allowed)
    wrong = "the part after the comma is not valid base64"
    return _read_base64(urllib.parse.unquote(body), argument, most, allowed, wrong)
