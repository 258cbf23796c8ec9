"""Loading of images as RGB, within size limits; encoding of images; image grids.

Five file formats are supported. Transparent pixels become white, and EXIF rotation is applied. Embedded
colour profiles are ignored, and CMYK is converted by Pillow's plain formula, as transformers' processors
expect.
"""

from __future__ import annotations

import base64
import contextlib
import io
import math
import struct
import threading
import warnings
import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageFile, ImageOps
from PIL.BmpImagePlugin import BmpImageFile
from PIL.GifImagePlugin import GifImageFile
from PIL.JpegImagePlugin import JpegImageFile
from PIL.PngImagePlugin import PngImageFile
from PIL.WebPImagePlugin import WebPImageFile

from mmspec.errors import InputError, MediaError
from mmspec.media.limits import DEFAULT_LIMITS, Described, MediaLimits, check_size
from mmspec.media.pixels import is_array, scale_16_bit, to_pixels
from mmspec.media.source import file_format, read_source
from mmspec.validation import is_integer

__all__ = [
    "data_url",
    "encode_image",
    "image_grid",
    "load_image",
    "load_images",
]

# Opened by class, not by Image.open, so that no other parser runs and only our own size limit applies.
_PLUGINS: dict[str, type[ImageFile.ImageFile]] = {
    "JPEG": JpegImageFile,
    "PNG": PngImageFile,
    "WEBP": WebPImageFile,
    "GIF": GifImageFile,
    "BMP": BmpImageFile,
}

# Errors of Pillow on damaged files and closed images; its parsers index and unpack without checks.
_DAMAGED = (
    *(OSError, SyntaxError, ValueError, TypeError, IndexError, KeyError, AttributeError, AssertionError),
    *(EOFError, OverflowError, MemoryError, RuntimeError, struct.error, zlib.error),
    Image.DecompressionBombError,
)

MOST_NAME = 255  # maximum length of a file name
_WARNINGS_LOCK = threading.Lock()


def load_image(
    source: object, *, argument: str = "images", limits: MediaLimits = DEFAULT_LIMITS
) -> Image.Image:
    """Load one image as RGB.

    Args:
        source: a path, bytes, an open file, base64, a `data:` URL or a public http(s) URL of a JPEG, PNG,
            WEBP, GIF or BMP file, or a dict with one of these (`mmspec.media.source.read_source`); or a PIL
            image; or a numpy array or torch tensor (see `mmspec.media.pixels` for layouts and value ranges).
            The first frame of an animated file and the current frame of an animated PIL image are used.
        argument: name of the argument in error messages.
        limits: limits on the size of the image.

    Returns:
        An RGB image in memory, without metadata, that shares no data with `source`.

    Raises:
        MediaError: the image is unreadable, damaged, truncated, of an unsupported format, or exceeds a limit.

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
        rule = f"must be a file in one of the formats {', '.join(_PLUGINS)}"
        raise MediaError(argument, Described(f"{name} data{file}"), rule)
    if name == "WEBP":  # its decoder allocates the canvas when it reads the header
        width, height = _webp_size(data)
        check_size(width, height, "a WEBP image", argument=argument, limits=limits)
    try:
        with _quietly():
            image = _PLUGINS[name](io.BytesIO(data))
    except _DAMAGED as error:
        raise MediaError(argument, Described(f"a {name} file{file}"), "has a damaged header") from error
    with image:
        return _to_rgb(image, f"a {name} image", argument, limits, file)


def load_images(
    sources: object, *, argument: str = "images", limits: MediaLimits = DEFAULT_LIMITS
) -> list[Image.Image]:
    """Load one image or a list of images; see `load_image`.

    Raises:
        MediaError: the list is empty, or an image cannot be loaded; the message has its index (`images[2]`).
    """
    if not isinstance(sources, list | tuple):
        return [load_image(sources, argument=argument, limits=limits)]
    if not sources:
        raise MediaError(argument, sources, "must have at least one image")
    return [
        load_image(source, argument=f"{argument}[{i}]", limits=limits) for i, source in enumerate(sources)
    ]


def _file_name(source: object, argument: str) -> str:
    """Return the name of a file in parentheses, unless the argument contains it; "" for other sources."""
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
        raise MediaError(argument, Described(what + file), "is damaged, truncated or closed") from error
    image.info = {}  # another library would apply an orientation left here a second time
    return image


def _turned(image: Image.Image) -> Image.Image:
    try:
        with _quietly():
            return ImageOps.exif_transpose(image)
    except _DAMAGED:  # damaged EXIF data, but an intact image
        return image


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Suppress Pillow's warnings about damaged metadata, also with `-W error`.

    The lock is needed because warning filters are global: two threads could restore each other's filters.
    """
    with _WARNINGS_LOCK, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


def _webp_size(data: bytes) -> tuple[int, int]:
    """Read width and height of the canvas from the first chunk; (0, 0) if its type is unknown."""
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


def image_grid(images: Sequence[Image.Image], columns: int | None = None) -> Image.Image:
    """Arrange images in a grid, row by row, as one RGB image for display.

    Args:
        images: PIL images, such as `output.images`. Cells have the size of the largest width and height.
        columns: number of columns; None makes the grid as square as possible.

    Returns:
        The grid, white where a cell is empty or larger than its image.

    Raises:
        InputError: `images` is not a list of at least one PIL image, or `columns` is not a positive integer.

    Example:
        >>> image_grid([Image.new("RGB", (8, 4)) for _ in range(5)]).size
        (24, 8)
    """
    if not isinstance(images, list | tuple) or not images:
        raise InputError("images", images, "must be a list of at least one PIL image")
    for index, image in enumerate(images):
        if not isinstance(image, Image.Image):
            raise InputError(f"images[{index}]", image, "must be a PIL image")
    if columns is not None and (not is_integer(columns) or columns < 1):
        raise InputError("columns", columns, "must be a positive integer, or None")
    columns = math.ceil(math.sqrt(len(images))) if columns is None else min(columns, len(images))
    width, height = max(image.width for image in images), max(image.height for image in images)
    grid = Image.new("RGB", (columns * width, math.ceil(len(images) / columns) * height), "white")
    for index, image in enumerate(images):
        row, column = divmod(index, columns)
        grid.paste(image.convert("RGB"), (column * width, row * height))
    return grid


def data_url(image: Image.Image, kind: str = "PNG", **options: object) -> str:
    """Encode an image as a `data:` URL; the arguments are those of `encode_image`."""
    return f"data:image/{kind.lower()};base64,{encode_image(image, kind, **options)}"


def encode_image(image: Image.Image, kind: str = "PNG", **options: object) -> str:
    """Encode an image as a base64 file in Pillow's format `kind`; options are passed to Pillow's `save`."""
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()
