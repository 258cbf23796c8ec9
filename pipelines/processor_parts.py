"""Wrappers of image and video processors: encode media once for several texts, or each image at its size."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from PIL import Image
from transformers import BatchFeature

from mmspec.errors import InputError
from mmspec.media.limits import MediaLimits, check_size
from mmspec.validation import is_integer

__all__ = ["checked_size", "read_once", "read_sized", "takes_sizes"]


#: Options of the image processors that resize to a number of pixels, in whole patches.
OF_SIZED = {"min_pixels", "max_pixels", "patch_size", "merge_size"}


class ReadOnce:
    """Image or video processor that encodes its first input and then repeats the result."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._first: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first is None:
            self._first = self._part(*args, **kwargs)
        return copy.copy(self._first)  # processors remove entries from it


def read_once(processor: Any) -> Any:
    """Copy a processor so that it encodes the media of one prompt once for several texts."""
    parts = [name for name in ("image_processor", "video_processor") if getattr(processor, name, None)]
    if not parts:
        return processor
    copied = copy.copy(processor)
    for name in parts:
        setattr(copied, name, ReadOnce(getattr(processor, name)))
    return copied


class ReadSized:
    """Image processor that resizes to a number of pixels, and encodes each image with its own size options.

    Args:
        part: the image processor.
        sizes: size options (`PIXEL_OPTIONS`) of each image.
    """

    def __init__(self, part: Any, sizes: Sequence[Mapping[str, int]]) -> None:
        self._part, self._sizes = part, sizes

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, images: Any, **kwargs: Any) -> BatchFeature:
        from transformers.image_utils import make_flat_list_of_images  # imports torchvision

        flat: Any = make_flat_list_of_images(images)
        read = [self._read(image, size, kwargs) for image, size in zip(flat, self._sizes, strict=True)]
        return BatchFeature({name: torch.cat([one[name] for one in read]) for name in read[0]})

    def _read(self, image: Image.Image, size: Mapping[str, int], kwargs: dict[str, Any]) -> BatchFeature:
        least, most = self._part.size["shortest_edge"], self._part.size["longest_edge"]
        if "resized_height" in size:
            factor = self._part.patch_size * self._part.merge_size
            wanted = size["resized_width"], size["resized_height"]
            width, height = (max(1, round(side / factor)) * factor for side in wanted)
            image = image.resize((width, height))
            least = most = width * height
        elif size:  # an option takes precedence over the processor's opposite bound
            least = size.get("min_pixels", min(least, size.get("max_pixels", least)))
            most = size.get("max_pixels", max(most, least))
        bounds = {"shortest_edge": least, "longest_edge": most}
        read: BatchFeature = self._part(images=[image], **kwargs, **({"size": bounds} if size else {}))
        return read


def checked_size(options: Mapping[str, Any], place: str, limits: MediaLimits | None) -> dict[str, int]:
    """Check and return the size options of an image.

    Raises:
        InputError: an option is not a positive integer within the limits, contradicts another one, or the
            model does not support size options.
    """
    for name, value in options.items():
        where = f"{place}[{name!r}]"
        if limits is None:
            raise InputError(
                where, value, "needs an image processor with min_pixels and max_pixels, such as Qwen-VL's"
            )
        if not is_integer(value) or not 1 <= value <= limits.max_pixels:
            raise InputError(where, value, f"must be an integer from 1 to {limits.max_pixels} (max_pixels)")
    if limits is not None and (options.keys() & {"resized_height", "resized_width"}):
        if len(options) != 2 or "resized_height" not in options or "resized_width" not in options:
            rule = "must have resized_height and resized_width together, and no other size option"
            raise InputError(place, dict(options), rule)
        height, width = options["resized_height"], options["resized_width"]
        check_size(width, height, "an image", argument=place, limits=limits)
    if options.get("min_pixels", 0) > options.get("max_pixels", math.inf):
        raise InputError(f"{place}['min_pixels']", options["min_pixels"], "must be at most max_pixels")
    return {name: int(value) for name, value in options.items()}


def takes_sizes(processor: Any) -> bool:
    """Whether a processor accepts a size for each image (`read_sized`)."""
    options = getattr(getattr(processor, "image_processor", None), "valid_kwargs", None)
    return getattr(options, "__annotations__", {}).keys() >= OF_SIZED


def read_sized(processor: Any, sizes: Sequence[Mapping[str, int]]) -> Any:
    """Copy a processor so that it encodes each image of one prompt at its size; unchanged without sizes."""
    if not sizes or not takes_sizes(processor):
        return processor
    copied = copy.copy(processor)
    copied.image_processor = ReadSized(processor.image_processor, sizes)
    return copied
