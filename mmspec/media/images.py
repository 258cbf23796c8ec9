"""Load images of every usual kind as RGB images, refuse too large ones by their headers, encode images.

Knows five file formats and no others; transparent places become white, EXIF rotation is applied. Embedded
colour profiles are ignored, and CMYK is converted by Pillow's plain formula, as every processor of
transformers expects.
"""

from __future__ import annotations

import base64
import contextlib
import io
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mmspec.errors import MediaError
from mmspec.media.limits import DEFAULT_LIMITS, Described, MediaLimits, check_size
from mmspec.media.pixels import is_array, scale_16_bit, to_pixels
from mmspec.media.source import file_format, read_source

__all__ = [
    "data_url",
    "encode_image",
    "load_image",
    "load_images",
]

# Opened by class, not by Image.open: no other parser can be reached, and no size is judged but by our limit.
_PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}

# What Pillow raises on damaged files and closed images: its parsers index and unpack without checking.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError),
    *(EOFError, OverflowError, MemoryError, RuntimeError, struct.error, zlib.error),
    Image.DecompressionBombError,
)

MOST_NAME = 255  # characters of a file's name
_WARNINGS_LOCK = threading.Lock()


def load_image(
    source: object, *, argument: str = "images", limits: MediaLimits = DEFAULT_LIMITS
) -> Image.Image:
    """Load one image.

    Args:
        source: a path, bytes, a `BytesIO`, base64, a `data:` URL or a public http(s) URL of a JPEG, PNG,
            WEBP, GIF or BMP file, or a dict of one of these (`mmspec.media.source.read_source`); or a PIL
            image; or a numpy array or torch tensor (layouts and value ranges: `mmspec.media.pixels`). Of an
            animated file the first frame is taken, of an animated PIL image the current one.
        argument: the argument that errors name.
        limits: the limits to keep.

    Returns:
        An RGB image in memory that shares nothing with `source` and carries no metadata.

    Raises:
        MediaError: unreadable, damaged, cut short, another format, or over a limit.

    Example:
        >>> import numpy as np
        >>> load_image(np.zeros((2, 3), dtype=bool)).size
        (3, 2)
    """
    if isinstance(source, Image.Image):
        return _to_rgb(source, "a PIL image", argument, limits)
    if is_array(source):
        pixels = to_pixels(source, argument=argument, limits=limits)
        return _to_rgb(Image.fromarray(np.ascontiguousarray(pixels)), "an array", argument, limits)
    data = read_source(source, argument=argument, limits=limits, max_bytes="max_bytes", kind="image")
    name = file_format(data)
    file = _file_name(source, argument)
    if name not in _PLUGINS:
        allowed = f"allowed are {', '.join(_PLUGINS)} files"
        raise MediaError(argument, Described(f"{name} data{file}"), allowed)
    if name == "WEBP":  # its decoder allocates the canvas while it reads the header
        width, height = _webp_size(data)
        check_size(width, height, "a WEBP image", argument=argument, limits=limits)
    try:
        with _quietly():
            image = _PLUGINS[name](io.BytesIO(data))
    except _DAMAGED as error:
        raise MediaError(argument, Described(f"a {name} file{file}"), "its header is damaged") from error
    with image:
        return _to_rgb(image, f"a {name} image", argument, limits, file)


def load_images(
    sources: object, *, argument: str = "images", limits: MediaLimits = DEFAULT_LIMITS
) -> list[Image.Image]:
    """Load a list or tuple of what `load_image` takes, or one of these alone.

    Raises:
        MediaError: an empty list, or what `load_image` raises, with the place in the list (`images[2]`).
    """
    if not isinstance(sources, list | tuple):
        return [load_image(sources, argument=argument, limits=limits)]
    if not sources:
        raise MediaError(argument, sources, "pass at least one image")
    return [
        load_image(source, argument=f"{argument}[{i}]", limits=limits) for i, source in enumerate(sources)
    ]


def _file_name(source: object, argument: str) -> str:
    """The name of a file, in parentheses, for messages that have not said it yet; "" for other sources."""
    if not isinstance(source, str | Path) or str(source)[:5].lower() == "data:" or str(source) in argument:
        return ""
    name = Path(source).name
    return f" ({name})" if len(name) <= MOST_NAME else ""  # base64 has no name


def _to_rgb(image: Image.Image, what: str, argument: str, limits: MediaLimits, file: str = "") -> Image.Image:
    check_size(*image.size, what, argument=argument, limits=limits)
    try:
        image.load()
        image = _turned(image)
        if image.mode in ("I", "F"):
            image = Image.fromarray(to_pixels(np.asarray(image), argument=argument, limits=limits))
        elif image.mode.startswith("I;16"):
            image = Image.fromarray(scale_16_bit(np.asarray(image)))
        elif image.has_transparency_data:
            white = Image.new("RGBA", image.size, "white")
            image = Image.alpha_composite(white, image.convert("RGBA"))
        image = image.convert("RGB")
    except MediaError:
        raise
    except _DAMAGED as error:
        raise MediaError(argument, Described(what + file), "it is damaged, cut short or closed") from error
    image.info = {}  # an orientation left here would be applied a second time by the next library
    return image


def _turned(image: Image.Image) -> Image.Image:
    try:
        with _quietly():
            return ImageOps.exif_transpose(image)
    except _DAMAGED:  # damaged EXIF data are no reason to refuse an intact image
        return image


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Keep Pillow's remarks about damaged metadata away from stderr, and from `-W error`.

    The filters of `warnings` belong to the process: two threads in here at once could restore each other's.
    """
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _webp_size(data: bytes) -> tuple[int, int]:
    """Read width and height of the canvas from the first chunk; (0, 0) where its kind is not known."""
    chunk = data[12:16]
    if len(data) < 30:
        return 0, 0
    if chunk == b"VP8X":
        return 1 + int.from_bytes(data[24:27], "little"), 1 + int.from_bytes(data[27:30], "little")
    if chunk == b"VP8L":
        bits = int.from_bytes(data[21:25], "little")
        return 1 + (bits & 0x3FFF), 1 + (bits >> 14 & 0x3FFF)
    if chunk == b"VP8 ":
        return int.from_bytes(data[26:28], "little") & 0x3FFF, int.from_bytes(data[28:30], "little") & 0x3FFF
    return 0, 0


def data_url(image: Image.Image, kind: str = "PNG", **options: object) -> str:
    """Encode an image as a `data:` URL; arguments as of `encode_image`."""
    return f"data:image/{kind.lower()};base64,{encode_image(image, kind, **options)}"


def encode_image(image: Image.Image, kind: str = "PNG", **options: object) -> str:
    """Encode an image as the base64 of a file of Pillow's format `kind`; options are of its `save`."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()
