"""Loading of videos as frames with timestamps. A child process decodes, so that a bad file cannot do harm.

Frames are sampled uniformly by count or by time. `decode_child.py` decodes with PyAV.
"""

from __future__ import annotations

import math
import numbers
import operator
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from mmspec.errors import MediaError
from mmspec.media.decoding import Child, decode, require_pyav
from mmspec.media.images import load_image
from mmspec.media.limits import DEFAULT_LIMITS, Described, MediaLimits, check_size
from mmspec.media.pixels import is_array
from mmspec.media.source import file_format, read_source
from mmspec.open_types import Keywords

__all__ = ["Video", "load_video", "sample_indices"]


@dataclass(frozen=True)
class Request:
    """Checked frame sampling arguments: number or rate, the limits, and the argument name for errors."""

    num_frames: int | None
    fps: float | None
    argument: str
    limits: MediaLimits


def sample_indices(
    total: int, timestamps: np.ndarray | None, *, num_frames: int | None, fps: float | None
) -> np.ndarray:
    """Sample frame indices uniformly.

    With `num_frames`, frame i of n is `i * total // n`, as in transformers: uniform by count. With `fps`, it
    is the frame shown i / fps seconds after the first one, so that videos with a variable frame rate are
    sampled uniformly in time. Without both, all frames are used.

    Args:
        total: number of frames of the video, at least 1.
        timestamps: float64 [total], ascending times in seconds of the frames; None if unknown.
        num_frames: number of frames to sample, 1..total.
        fps: number of frames to sample per second, at most about the frame rate; needs timestamps.

    Returns:
        Indices, int64 [T], ascending.
    """
    if num_frames is not None:
        return np.arange(num_frames) * total // num_frames
    if fps is None or timestamps is None:
        return np.arange(total)
    times = timestamps[0] + np.arange(_count_at(timestamps, fps)) / fps
    # tolerance of 1 ms, since containers round timestamps to their time base
    shown = np.searchsorted(timestamps, times + 1e-3, side="right") - 1
    return np.asarray(shown, dtype=np.int64)


def _count_at(timestamps: np.ndarray, fps: float) -> int:
    rate = mean_rate(timestamps)
    return max(1, math.ceil(len(timestamps) / rate * fps - 1e-3)) if rate else 1


def mean_rate(timestamps: np.ndarray) -> float | None:
    """Return the mean frame rate from the timestamps; the rate in the header may be zero, NaN or wrong."""
    span = float(timestamps[-1] - timestamps[0])
    return round((len(timestamps) - 1) / span, 3) if span > 0 else None


def check_request(num_frames: object, fps: object, argument: str, limits: MediaLimits) -> Request:
    """Check the sampling arguments before the video is opened.

    Raises:
        MediaError: both are given, one is not a positive number, or `num_frames` exceeds `max_frames`.
    """
    if num_frames is not None and fps is not None:
        raise MediaError("fps", fps, "cannot be combined with num_frames")
    if fps is not None:
        try:
            rate = float(fps) if isinstance(fps, numbers.Real) and not isinstance(fps, bool) else 0
        except OverflowError:  # an int beyond the range of floats
            rate = math.inf
        if not 0 < rate < math.inf:
            got = fps if rate < math.inf else rate
            rule = "must be above 0 and at most the frame rate of the video"
            raise MediaError("fps", got, rule)
        return Request(None, rate, argument, limits)
    if num_frames is None:
        return Request(None, None, argument, limits)
    whole = limits.rule("max_frames", "must be an integer of at least 1 and at most {}")
    try:
        count = operator.index(num_frames)  # type: ignore[arg-type]
    except TypeError as error:
        raise MediaError("num_frames", num_frames, whole) from error
    if isinstance(num_frames, bool) or not 1 <= count <= limits.max_frames:
        raise MediaError("num_frames", num_frames, whole)
    return Request(count, None, argument, limits)


def choose_frames(
    total: int, timestamps: np.ndarray | None, most: int, size: tuple[int, int], request: Request
) -> np.ndarray:
    """Check the sampling arguments against the video, and sample as `sample_indices` does.

    Without a number and a rate, at most `most` frames of a video with timestamps are used, and all of others.

    Raises:
        MediaError: more frames than the video has are requested, a higher rate than its own, or more frames
            or pixels of this size (width, height) than the limits allow.
    """
    num_frames, fps, limits = request.num_frames, request.fps, request.limits
    rate = None if timestamps is None else mean_rate(timestamps)
    if num_frames is not None and num_frames > total:
        raise MediaError("num_frames", num_frames, f"must be at most {total}, the frames of this video")
    if fps is not None and rate is not None and fps > 1.01 * rate:
        raise MediaError("fps", fps, f"must be at most {rate:g}, the frame rate of this video")
    if num_frames is None and fps is None and timestamps is not None:
        num_frames = min(total, most)
    count = num_frames or total
    if fps is not None and timestamps is not None:
        count = _count_at(timestamps, fps)
    if count > limits.max_frames:
        instead = "num_frames" if fps is None else "num_frames or a lower fps"
        rule = limits.rule("max_frames", f"must be sampled to at most {{}} frames with {instead}")
        raise MediaError(request.argument, Described(f"{count:,} frames"), rule)
    indices = sample_indices(total, timestamps, num_frames=num_frames, fps=fps)
    width, height = size
    if len(indices) * width * height > limits.max_video_pixels:
        taken = Described(f"{len(indices)} frames of {width:,} x {height:,} pixels")
        rule = limits.rule(
            "max_video_pixels", "must be sampled to fewer frames, with at most {} pixels in all"
        )
        raise MediaError(request.argument, taken, rule)
    return indices


_FORMATS = ("MP4", "Matroska or WebM", "AVI", "GIF")
MICROSECONDS = 1_000_000  # per second
TIME_TOLERANCE_S = 1e-3  # containers round times to their time base, Matroska to milliseconds
_FASTEST_CAMERA = 240  # frames per second; bounds the number of timestamps read from the child


@dataclass(frozen=True)
class Video:
    """Frames sampled from a video.

    Attributes:
        frames: uint8 [T, H, W, 3], in the orientation in which they are shown.
        frames_indices: int64 [T], indices of the frames in the source.
        total_num_frames: number of frames of the source.
        timestamps: float64 [T], seconds since the first frame of the source; None for a list of frames.
        fps: mean frame rate of the source; None if unknown (a list, or a single frame).
        backend: "pyav", or "frames" for a list or array of frames.
    """

    frames: np.ndarray
    frames_indices: np.ndarray
    total_num_frames: int
    timestamps: np.ndarray | None
    fps: float | None
    backend: str

    @property
    def metadata(self) -> Keywords:
        """Metadata for the `video_metadata` argument of transformers' video processors.

        Processors compute times from frame indices and a rate. For a variable frame rate these would be
        wrong; then the indices are in microseconds.
        """
        total, fps, indices = self.total_num_frames, self.fps, self.frames_indices
        duration = None if fps is None else total / fps
        if fps is not None and duration is not None and self.timestamps is not None:
            error = np.abs(indices / fps - self.timestamps).max()
            if error > TIME_TOLERANCE_S:
                total, fps = round(duration * MICROSECONDS), MICROSECONDS
                indices = np.rint(self.timestamps * MICROSECONDS).astype(np.int64)
        return {
            "total_num_frames": total,
            "fps": fps,
            "width": self.frames.shape[2],
            "height": self.frames.shape[1],
            "duration": duration,
            "video_backend": self.backend,
            "frames_indices": indices.tolist(),
        }


def load_video(
    source: object,
    *,
    num_frames: int | None = None,
    fps: float | None = None,
    argument: str = "videos",
    limits: MediaLimits = DEFAULT_LIMITS,
) -> Video:
    """Load and sample the frames of one video.

    Args:
        source: a path, bytes, an open file, base64, a `data:` URL or a public http(s) URL of an MP4, MOV,
            WebM, Matroska, AVI or GIF file, or a dict with one of these; or the frames, as a list of sources
            of `load_image` or as an array or tensor [T, H, W, C] or [T, C, H, W].
        num_frames: number of frames to sample (`mmspec.media.video.sample_indices`). Without it and `fps`,
            all frames are used; those of a file up to `max_frames` and `max_video_pixels`.
        fps: number of frames to sample per second. Lists of frames have no times and do not support it.
        argument: name of the argument in error messages.
        limits: limits on size, duration and decoding.

    Raises:
        MediaError: the video is unreadable, damaged, of an unsupported format, has fewer frames than
            requested, or exceeds a limit, including the time and memory for decoding.
        MissingDependencyError: PyAV is not installed.
    """
    request = check_request(num_frames, fps, argument, limits)
    if isinstance(source, list | tuple) or is_array(source):
        return _from_frames(source, request)
    if isinstance(source, Image.Image):
        raise MediaError(argument, Described("one image"), "must be a video or a list of frames")
    data = read_source(source, argument=argument, limits=limits, max_bytes="max_video_bytes", kind="video")
    name = file_format(data)
    if name not in _FORMATS:  # also refuses playlists, with which FFmpeg would open other files
        rule = f"must be a file in one of the formats {', '.join(_FORMATS)}"
        raise MediaError(argument, Described(f"{name} data"), rule)
    if name == "GIF":
        width, height = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
        check_size(width, height, "a GIF", argument=argument, limits=limits)
    require_pyav("videos")
    return decode(data, lambda child: _converse(child, data, request), argument=argument, limits=limits)


def _from_frames(source: Any, request: Request) -> Video:
    argument, limits, total = request.argument, request.limits, len(source)
    if request.fps is not None:
        raise MediaError("fps", request.fps, "cannot be used with a list of frames; pass num_frames")
    if is_array(source) and len(source.shape) != 4:
        raise MediaError(argument, source, "must have the shape [T, H, W, C] or [T, C, H, W]")
    if total == 0:
        raise MediaError(argument, Described("no frames"), "must have at least one frame")
    # every sample starts with frame 0
    first = np.asarray(load_image(source[0], argument=f"{argument}[0]", limits=limits))  # [H, W, 3]
    height, width = first.shape[:2]
    indices = choose_frames(total, None, total, (width, height), request)
    frames = np.empty((len(indices), *first.shape), np.uint8)
    for place, index in enumerate(indices.tolist()):
        name = f"{argument}[{index}]"
        frame = np.asarray(load_image(source[index], argument=name, limits=limits)) if index else first
        if frame.shape != first.shape:
            size = Described(f"a frame of {frame.shape[1]} x {frame.shape[0]} pixels")
            raise MediaError(name, size, f"must have {width} x {height} pixels, like the first frame")
        frames[place] = frame
    return Video(frames, indices, total, timestamps=None, fps=None, backend="frames")


def _converse(child: Child, data: bytes, request: Request) -> Video:
    """Exchange data with the child as documented in `decode_child.py`; check everything that it sends."""
    argument, limits = request.argument, request.limits
    header = child.open(data, "video")
    width, height, total = header["width"], header["height"], header["total"]
    check_size(width, height, "a video", argument=argument, limits=limits)
    if total > _FASTEST_CAMERA * limits.max_video_seconds:
        rule = limits.rule("max_video_seconds", "must last at most {} seconds")
        raise MediaError(argument, Described(f"a video of {total:,} frames"), rule)
    timestamps = np.frombuffer(child.read(total * 8), np.float64)
    if total == 0 or not (np.isfinite(timestamps).all() and (np.diff(timestamps) >= 0).all()):
        got = Described(f"a video of {total} frames")
        raise MediaError(argument, got, "must have frames with valid timestamps")
    seconds = float(timestamps[-1] - timestamps[0])
    if seconds > limits.max_video_seconds:
        rule = limits.rule("max_video_seconds", "must last at most {} seconds")
        raise MediaError(argument, Described(f"a video of {seconds:.1f} seconds"), rule)
    timestamps = timestamps - timestamps[0]
    most = min(limits.max_frames, max(1, limits.max_video_pixels // (width * height)))
    indices = choose_frames(total, timestamps, most, (width, height), request)
    child.write_line(indices.tolist())
    frames = np.empty((len(indices), height, width, 3), np.uint8)
    for frame in frames:
        frame[:] = np.frombuffer(child.read(frame.size), np.uint8).reshape(frame.shape)
    return Video(frames, indices, total, timestamps[indices], mean_rate(timestamps), "pyav")
