"""Load videos as frames with their times, decoded in a process that may crash or hang without harm.

Frames are chosen uniformly, in their count or in time. Decoding itself, by PyAV, is in `decode_child.py`.
"""

from __future__ import annotations

import importlib.util
import json
import math
import numbers
import operator
import os
import subprocess
import sys
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
from PIL import Image

from mmspec.errors import MediaError, MissingDependencyError
from mmspec.media.images import load_image
from mmspec.media.limits import DEFAULT_LIMITS, Described, MediaLimits, check_size
from mmspec.media.pixels import is_array
from mmspec.media.source import file_format, read_source
from mmspec.open_types import Keywords

__all__ = ["Video", "load_video", "sample_indices"]


@dataclass(frozen=True)
class Request:
    """Checked choice of frames of a video: number or rate, the limits, and the argument of errors."""

    num_frames: int | None
    fps: float | None
    argument: str
    limits: MediaLimits


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


def check_request(num_frames: object, fps: object, argument: str, limits: MediaLimits) -> Request:
    """Check a request before the video is opened.

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
        return Request(None, rate, argument, limits)
    if num_frames is None:
        return Request(None, None, argument, limits)
    whole = f"a whole number, 1..{limits.max_frames}: {limits.allows('max_frames', 'frames')}"
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
    """Sample as `sample_indices` does, after checking the request against the video.

    Where neither number is given, `most` frames are taken of a video with times, and all of others.

    Raises:
        MediaError: more frames than the video has, a rate above its own, or more frames or pixels of this
            size (width, height) than the limits allow.
    """
    num_frames, fps, limits = request.num_frames, request.fps, request.limits
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
        raise MediaError(request.argument, Described(f"{count:,} frames to take"), allowed)
    indices = sample_indices(total, timestamps, num_frames=num_frames, fps=fps)
    width, height = size
    if len(indices) * width * height > limits.max_video_pixels:
        taken = Described(f"{len(indices)} frames of {width:,} x {height:,} pixels to take")
        allowed = f"take fewer: {limits.allows('max_video_pixels', 'pixels in all')}"
        raise MediaError(request.argument, taken, allowed)
    return indices


_FORMATS = ("MP4", "Matroska or WebM", "AVI", "GIF")
MICROSECONDS = 1_000_000  # a second
TIME_TOLERANCE_S = 1e-3  # containers round times to their time base, Matroska to milliseconds
_FASTEST_CAMERA = 240  # frames a second; bounds the index of frames that a lying header makes us read


@dataclass(frozen=True)
class Video:
    """Frames sampled from a video.

    Attributes:
        frames: uint8 [T, H, W, 3], rotated as shown.
        frames_indices: int64 [T], which frames of the source these are.
        total_num_frames: frames of the source.
        timestamps: float64 [T], seconds since the first frame of the source is shown; None if the source was
            a list of frames.
        fps: mean frames a second of the source; None if it is not known (a list, or a single frame).
        backend: what decoded it: "pyav", or "frames" where they were given.
    """

    frames: np.ndarray
    frames_indices: np.ndarray
    total_num_frames: int
    timestamps: np.ndarray | None
    fps: float | None
    backend: str

    @property
    def metadata(self) -> Keywords:
        """Metadata of the video, as transformers' video processors take it by `video_metadata`.

        They compute times from numbers of frames and a rate. Where the rate is uneven, that would be other
        times than the frames': then frames are counted in microseconds.
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
    """Load frames of one video.

    Args:
        source: a path, bytes, a `BytesIO`, base64, a `data:` URL or a public http(s) URL of an MP4, MOV,
            WebM, Matroska, AVI or GIF file, or a dict of one of these; or the frames, as a list of what
            `load_image` takes or an array or tensor [T, H, W, C] or [T, C, H, W].
        num_frames: how many frames to take, see `mmspec.media.video.sample_indices`. Without it and `fps`,
            all frames of a list; of a file all, or as many as `max_frames` and `max_video_pixels` allow.
        fps: how many frames to take from each second instead; not for lists of frames, which have no times.
        argument: the argument that errors name.
        limits: the limits to keep.

    Raises:
        MediaError: unreadable, damaged, another format, a number of frames that the video does not have, or
            over a limit, those of time and memory for decoding included.
        MissingDependencyError: PyAV is not installed.
    """
    request = check_request(num_frames, fps, argument, limits)
    if isinstance(source, list | tuple) or is_array(source):
        return _from_frames(source, request)
    if isinstance(source, Image.Image):
        raise MediaError(argument, Described("one image"), "pass a video, or a list of frames")
    data = read_source(source, argument=argument, limits=limits, max_bytes="max_video_bytes", kind="video")
    name = file_format(data)
    if name not in _FORMATS:  # also keeps playlists out, with which FFmpeg would open other files
        raise MediaError(argument, Described(f"{name} data"), f"allowed are {', '.join(_FORMATS)} files")
    if name == "GIF":
        width, height = (int.from_bytes(data[at : at + 2], "little") for at in (6, 8))
        check_size(width, height, "a GIF", argument=argument, limits=limits)
    if importlib.util.find_spec("av") is None:
        raise MissingDependencyError("reading videos needs PyAV: pip install av")
    return _decode(data, request)


def _from_frames(source: Any, request: Request) -> Video:
    argument, limits, total = request.argument, request.limits, len(source)
    if request.fps is not None:
        raise MediaError("fps", request.fps, "a list of frames has no times; pass num_frames")
    if is_array(source) and len(source.shape) != 4:
        raise MediaError(argument, source, "an array of frames is [T, H, W, C] or [T, C, H, W]")
    if total == 0:
        raise MediaError(argument, Described("no frames"), "pass at least one frame")
    # frame 0 is the first of every sample
    first = np.asarray(load_image(source[0], argument=f"{argument}[0]", limits=limits))  # [H, W, 3]
    height, width = first.shape[:2]
    indices = choose_frames(total, None, total, (width, height), request)
    frames = np.empty((len(indices), *first.shape), np.uint8)
    for place, index in enumerate(indices.tolist()):
        name = f"{argument}[{index}]"
        frame = np.asarray(load_image(source[index], argument=name, limits=limits)) if index else first
        if frame.shape != first.shape:
            size = Described(f"a frame of {frame.shape[1]} x {frame.shape[0]} pixels")
            raise MediaError(name, size, f"the first one has {width} x {height}; all must agree")
        frames[place] = frame
    return Video(frames, indices, total, timestamps=None, fps=None, backend="frames")


def _decode(data: bytes, request: Request) -> Video:
    """Decode in a child process, and end that process whatever happens."""
    # Not multiprocessing: its spawn runs the user's main script again, its fork copies locks that other
    # threads hold.
    limits = request.limits
    program = str(Path(__file__).with_name("decode_child.py"))
    numbers = (len(data), math.ceil(limits.decode_timeout_s), int(limits.decode_memory_bytes))
    command = [sys.executable, "-P", program, *map(str, numbers)]
    one_thread = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}  # each thread takes address space
    is_late = threading.Event()
    with subprocess.Popen(
        command,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, **one_thread},
    ) as child:

        def end() -> None:
            is_late.set()
            child.kill()

        timer = threading.Timer(limits.decode_timeout_s, end)
        timer.daemon = True
        timer.start()
        try:
            return _converse(child, data, request)
        except (BrokenPipeError, EOFError, json.JSONDecodeError) as error:
            if is_late.is_set():
                allowed = limits.allows("decode_timeout_s", "seconds to decode one video")
            else:
                allowed = "it cannot be decoded: damaged, cut short, or more than the decoder may take: "
                allowed += limits.allows("decode_memory_bytes", "bytes")
            raise MediaError(request.argument, Described(f"{file_format(data)} data"), allowed) from error
        finally:
            timer.cancel()
            child.kill()
            timer.join()  # it is awake for an instant only; no thread outlives the call


def _converse(child: subprocess.Popen[bytes], data: bytes, request: Request) -> Video:
    """Exchange data with the child as `decode_child.py` describes; trust nothing that it sends."""
    argument, limits = request.argument, request.limits
    if child.stdin is None or child.stdout is None:
        raise EOFError("the child has no pipes")
    child.stdin.write(data)
    child.stdin.flush()
    header = json.loads(child.stdout.readline(1000))
    if "refused" in header:
        raise MediaError(argument, Described(f"{file_format(data)} data"), header["refused"])
    width, height, total = header["width"], header["height"], header["total"]
    check_size(width, height, "a video", argument=argument, limits=limits)
    if total > _FASTEST_CAMERA * limits.max_video_seconds:
        allowed = limits.allows("max_video_seconds", "seconds")
        raise MediaError(argument, Described(f"a video of {total:,} frames"), allowed)
    timestamps = np.frombuffer(_read(child.stdout, total * 8), np.float64)
    if total == 0 or not (np.isfinite(timestamps).all() and (np.diff(timestamps) >= 0).all()):
        got = Described(f"a video of {total} frames")
        raise MediaError(argument, got, "it has no frames with usable times")
    seconds = float(timestamps[-1] - timestamps[0])
    if seconds > limits.max_video_seconds:
        allowed = limits.allows("max_video_seconds", "seconds")
        raise MediaError(argument, Described(f"a video of {seconds:.1f} seconds"), allowed)
    timestamps = timestamps - timestamps[0]
    most = min(limits.max_frames, max(1, limits.max_video_pixels // (width * height)))
    indices = choose_frames(total, timestamps, most, (width, height), request)
    child.stdin.write(json.dumps(indices.tolist()).encode() + b"\n")
    child.stdin.flush()
    frames = np.empty((len(indices), height, width, 3), np.uint8)
    for frame in frames:
        frame[:] = np.frombuffer(_read(child.stdout, frame.size), np.uint8).reshape(frame.shape)
    return Video(frames, indices, total, timestamps[indices], mean_rate(timestamps), "pyav")


def _read(pipe: IO[bytes], count: int) -> bytes:
    data = pipe.read(count)
    if len(data) < count:
        raise EOFError
    return data
