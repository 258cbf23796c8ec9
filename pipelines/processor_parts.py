"""Stand-ins for parts of a processor that read media: once for several texts, or each image in its size."""

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


class ReadOnce:
    """Stands for the part of a processor that reads media; it reads once, and then repeats what it gave."""

    def __init__(self, part: Any) -> None:
        self._part = part
        self._first: Any = None

    def __getattr__(self, name: str) -> Any:
        return getattr(self._part, name)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if self._first is None:
            self._first = self._part(*args, **kwargs)
        return copy.copy(self._first)  # processors take out of it what they need alone


def read_once(processor: Any) -> Any:
    """A copy of a processor that reads the media of one prompt once, however many texts stand around them."""
    parts = [name for name in ("image_processor", "video_processor") if getattr(processor, name, None)]
    if not parts:
        return processor
    copied = copy.copy(processor)
    for name in parts:
        setattr(copied, name, ReadOnce(getattr(processor, name)))
    return copied


class ReadSized:
    """Stands for the image processor of a Qwen-VL; it reads each image with the size options of its part.

    Args:
        part: the image processor.
        sizes: options of each image, of `PIXEL_OPTIONS`.
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
        elif size:  # an option wins over the bound on the other side that is the processor's own
            least = size.get("min_pixels", min(least, size.get("max_pixels", least)))
            most = size.get("max_pixels", max(most, least))
        bounds = {"shortest_edge": least, "longest_edge": most}
        read: BatchFeature = self._part(images=[image], **kwargs, **({"size": bounds} if size else {}))
        return read


def checked_size(options: Mapping[str, Any], place: str, limits: MediaLimits | None) -> dict[str, int]:
    """The size options of an image.

    Raises:
        InputError: they are no positive integers within the limits, contradict each other, or are not taken.
    """
    for name, value in options.items():
        where = f"{place}[{name!r}]"
        if limits is None:
            raise InputError(where, value, "nothing: image processors of Qwen-VL alone take sizes of parts")
        if not is_integer(value) or not 1 <= value <= limits.max_pixels:
            raise InputError(where, value, f"an integer from 1 to {limits.max_pixels} (max_pixels)")
    if limits is not None and (options.keys() & {"resized_height", "resized_width"}):
        if len(options) != 2 or "resized_height" not in options or "resized_width" not in options:
            raise InputError(place, dict(options), "resized_height and resized_width together, and no other")
        height, width = options["resized_height"], options["resized_width"]
        check_size(width, height, "an image", argument=place, limits=limits)
    if options.get("min_pixels", 0) > options.get("max_pixels", math.inf):
        raise InputError(f"{place}['min_pixels']", options["min_pixels"], "at most max_pixels")
    return {name: int(value) for name, value in options.items()}


def takes_sizes(processor: Any) -> bool:
    """True for a processor that `read_sized` can give sizes to."""
    part = getattr(processor, "image_processor", None)
    return any(kind.__name__ == "Qwen2VLImageProcessor" for kind in type(part).__mro__)


def read_sized(processor: Any, sizes: Sequence[Mapping[str, int]]) -> Any:
    """A copy of a processor that reads each image of one prompt in its size; itself without sizes."""
    if not sizes or not takes_sizes(processor):
        return processor
    copied = copy.copy(processor)
    copied.image_processor = ReadSized(processor.image_processor, sizes)
    return copied
