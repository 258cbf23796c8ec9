"""Choose the frames of a video: uniform in their count, or in time.

Knows times and numbers of frames, not how they are decoded.
"""

from __future__ import annotations

import math
import numbers
import operator

import numpy as np

from mmspec.errors import MediaError
from mmspec.media.limits import Described, MediaLimits

__all__ = ["check_frames", "check_request", "choose_frames", "mean_rate", "sample_indices"]


def sample_indices(
    total: int, timestamps: np.ndarray | None, *, num_frames: int | None, fps: float | None
) -> np.ndarray:
    """Choose frames uniformly.

    With `num_frames`, frame i of n is `i * total // n`, as in transformers: uniform in the count of frames.
    With `fps`, it is the frame on screen at i / fps seconds, so that videos of variable frame rate are
    sampled uniformly in time; the first is at the first frame's time. Without both, all frames.

    Args:
        total: frames of the video, 1 or more.
        timestamps: float64 [total], seconds at which each frame is shown, ascending; None if not known.
        num_frames: how many to take, 1..total.
        fps: how many to take from each second, at most about what the video has; needs timestamps.

    Returns:
        int64 [T], ascending.
    """
    if num_frames is not None:
        return np.arange(num_frames) * total // num_frames
    if fps is None or timestamps is None:
        return np.arange(total)
    times = timestamps[0] + np.arange(_count_at(timestamps, fps)) / fps
    # A thousandth of a second of mercy: containers round timestamps to their time base.
    shown = np.searchsorted(timestamps, times + 1e-3, side="right") - 1
    return np.asarray(shown, dtype=np.int64)


def _count_at(timestamps: np.ndarray, fps: float) -> int:
    rate = mean_rate(timestamps)
    return max(1, math.ceil(len(timestamps) / rate * fps - 1e-3)) if rate else 1


def mean_rate(timestamps: np.ndarray) -> float | None:
    """Mean frames a second by the timestamps; the header's own number may be zero, NaN or a lie."""
    span = float(timestamps[-1] - timestamps[0])
    return round((len(timestamps) - 1) / span, 3) if span > 0 else None


def check_request(num_frames: object, fps: object, *, limits: MediaLimits) -> tuple[int | None, float | None]:
    """Check a request before the video is opened; return `num_frames` and `fps` as plain numbers.

    Raises:
        MediaError: both given, not numbers, not positive, or more frames than `max_frames`.
    """
    if num_frames is not None and fps is not None:
        raise MediaError("fps", fps, "pass either num_frames or fps")
    if fps is not None:
        try:
            rate = float(fps) if isinstance(fps, numbers.Real) and not isinstance(fps, bool) else 0
        except OverflowError:  # an int that no float can hold
            rate = math.inf
        if not 0 < rate < math.inf:
            got = fps if rate < math.inf else rate
            raise MediaError("fps", got, "a finite number above 0, at most the frame rate of the video")
        return None, rate
    if num_frames is None:
        return None, None
    whole = f"a whole number, 1..{limits.max_frames}: {limits.allows('max_frames', 'frames')}"
    try:
        count = operator.index(num_frames)  # type: ignore[arg-type]
    except TypeError as error:
        raise MediaError("num_frames", num_frames, whole) from error
    if isinstance(num_frames, bool) or not 1 <= count <= limits.max_frames:
        raise MediaError("num_frames", num_frames, whole)
    return count, None


def choose_frames(
    total: int,
    timestamps: np.ndarray | None,
    *,
    num_frames: int | None,
    fps: float | None,
    most: int,
    argument: str,
    limits: MediaLimits,
) -> np.ndarray:
    """Sample as `sample_indices` does, after checking the request against the video.

    Args:
        total, timestamps, num_frames, fps: see there.
        most: frames of a video with times that are taken where neither number is given.
        argument, limits: of errors.

    Raises:
        MediaError: more frames than the video has, a rate above its own, or more than `max_frames`.
    """
    rate = None if timestamps is None else mean_rate(timestamps)
    if num_frames is not None and num_frames > total:
        raise MediaError("num_frames", num_frames, f"this video has {total:,} frames; pass 1..{total}")
    if fps is not None and rate is not None and fps > 1.01 * rate:
        raise MediaError("fps", fps, f"this video has {rate:g} frames a second; pass at most that")
    if num_frames is None and fps is None and timestamps is not None:
        num_frames = min(total, most)
    count = num_frames or total
    if fps is not None and timestamps is not None:
        count = _count_at(timestamps, fps)
    if count > limits.max_frames:
        instead = "num_frames" if fps is None else "num_frames or a lower fps"
        allowed = f"pass {instead}: {limits.allows('max_frames', 'frames')}"
        raise MediaError(argument, Described(f"{count:,} frames to take"), allowed)
    return sample_indices(total, timestamps, num_frames=num_frames, fps=fps)


def check_frames(count: int, width: int, height: int, *, argument: str, limits: MediaLimits) -> None:
    """Refuse more pixels in all frames together than `max_video_pixels`.

    Raises:
        MediaError: too many.
    """
    if count * width * height > limits.max_video_pixels:
        taken = Described(f"{count} frames of {width:,} x {height:,} pixels to take")
        raise MediaError(argument, taken, f"take fewer: {limits.allows('max_video_pixels', 'pixels in all')}")
