"""Conversion of arrays and tensors to 8-bit pixels. Ambiguous values are refused.

| type | meaning of the values |
|---|---|
| bool | False is black, True is white |
| uint8 | 8-bit values |
| uint16 | 16-bit values, 65,535 is white; refused if all are below 256, since they are likely 8-bit values |
| other integers | 8-bit values, all in 0..255 |
| floats | 1.0 is white; all in 0..1 |
"""

from __future__ import annotations

from typing import Any

import numpy as np

from mmspec.errors import MediaError
from mmspec.media.limits import MediaLimits, check_size

__all__ = ["as_numpy", "is_array", "scale_16_bit", "to_pixels", "to_uint8"]

_LAYOUTS = "must have the shape [H, W], [H, W, C] or [C, H, W], with 1, 3 or 4 channels"


def is_tensor(value: object) -> bool:
    """Whether a value is a torch tensor, without importing torch."""
    return all(hasattr(value, name) for name in ("detach", "cpu", "is_floating_point", "shape"))


def is_array(value: object) -> bool:
    """Whether a value is a numpy array or a torch tensor."""
    return isinstance(value, np.ndarray) or is_tensor(value)


def to_pixels(array: Any, *, argument: str, limits: MediaLimits) -> np.ndarray:
    """Convert an image array or tensor to 8-bit values, channels last: uint8 [H, W] or [H, W, C].

    The input is [H, W], [H, W, C] or [C, H, W], with C = 1, 3 or 4. If both layouts fit, arrays are read as
    channels last and tensors as channels first.

    Raises:
        MediaError: the shape or the values are not supported (see the table of this module), or the image is
            too large.
    """
    channels_last = _channels_last(tuple(array.shape), prefer_last=not is_tensor(array))
    if channels_last is None:
        raise MediaError(argument, array, _LAYOUTS)
    height, width = array.shape[:2] if channels_last else array.shape[-2:]
    check_size(width, height, "an array", argument=argument, limits=limits)
    pixels = to_uint8(as_numpy(array, argument), argument=argument)
    if not channels_last:
        pixels = np.moveaxis(pixels, 0, -1)
    return pixels[..., 0] if pixels.ndim == 3 and pixels.shape[-1] == 1 else pixels


def _channels_last(shape: tuple[int, ...], *, prefer_last: bool) -> bool | None:
    """Return whether a shape is channels last; None if neither layout fits."""
    if len(shape) == 2:
        return True
    if len(shape) != 3:
        return None
    for last in (prefer_last, not prefer_last):
        if shape[-1 if last else 0] in (1, 3, 4):
            return last
    return None


def as_numpy(array: Any, argument: str) -> np.ndarray:
    """Convert an array or a tensor on any device to NumPy; bfloat16 becomes float32.

    Raises:
        MediaError: the tensor is not dense or has no values.
    """
    if isinstance(array, np.ndarray):
        return array
    try:
        tensor = array.detach().cpu()
        # numpy has no bfloat16
        return np.asarray((tensor.float() if tensor.is_floating_point() else tensor).numpy())
    except (TypeError, ValueError, RuntimeError) as error:  # sparse, quantized, meta, ...
        raise MediaError(argument, array, "must be a dense tensor with values") from error


def to_uint8(array: np.ndarray, *, argument: str) -> np.ndarray:
    """Scale values to 0..255 by the table of this module.

    Raises:
        MediaError: the data type or the values are not in the table.
    """
    if array.dtype == np.uint8:
        return array
    if array.dtype == np.bool_:
        return array.astype(np.uint8) * np.uint8(255)
    if array.dtype.kind not in "uif":
        raise MediaError(argument, array, "must have bool, integer or float values")
    low, high = array.min().item(), array.max().item()
    if array.dtype.kind == "f":
        if not np.isfinite(array).all():
            raise MediaError(argument, array, "must have floats in 0..1, without NaN and infinity")
        if low < 0 or high > 1:
            rule = f"must have floats in 0..1, not in {low:.4g}..{high:.4g}; scale or clamp them"
            raise MediaError(argument, array, rule)
        return np.round(array.astype(np.float32) * 255).astype(np.uint8)
    if array.dtype.itemsize == 2 and array.dtype.kind == "u":
        if 0 < high < 256:
            rule = f"must use the range 0..65,535, not 0..{high}; pass 8-bit values as uint8"
            raise MediaError(argument, array, rule)
        return scale_16_bit(array)
    if low < 0 or high > 255:
        raise MediaError(argument, array, f"must have integers in 0..255, not in {low}..{high}")
    return array.astype(np.uint8)


def scale_16_bit(array: np.ndarray) -> np.ndarray:
    """Scale 0..65,535 to 0..255, rounding to nearest: 257 steps of 16 bits are one step of 8 bits."""
    return ((array.astype(np.uint32) + 128) // 257).astype(np.uint8)
