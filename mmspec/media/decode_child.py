"""Program that decodes a video in a process of its own, so that a bad file can only kill that process.

Knows the decoding libraries and the pipe to its parent, and no limits but those of the process; imports
nothing of mmspec, so that it starts fast. Conversation, numbers in the machine's byte order:

    parent: the file's bytes (their count stands in argv, as do the names of the readers to try)
    child:  one line of JSON, {"reader", "width", "height", "total"} or {"refused": why}
    child:  float64 timestamps [total]
    parent: one line of JSON: indices of the wanted frames, in ascending order
    child:  uint8 frames [height, width, 3], one after the other
"""

from __future__ import annotations

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import numpy as np

NO_STREAM = "no video stream was found in it: it has none, or is cut short"


class Refused(Exception):
    """Error: the file is intact, but not a video that we can give frames of."""


class Unreadable(Exception):
    """Error: this library cannot open the file; another might."""


class Reader(Protocol):
    """Interface of a decoding library.

    Attributes:
        timestamps: float64 [total], seconds at which each frame is shown, in ascending order.
        width: columns of a frame as shown, after rotation.
        height: rows of a frame as shown, after rotation.
    """

    timestamps: np.ndarray
    width: int
    height: int

    def frames(self, indices: list[int]) -> Iterator[np.ndarray]:
        """Yield uint8 [height, width, 3] for ascending indices."""


class DecordReader:
    """Read frames by decord.

    decord 0.6.0 shears the rows of rotated videos (64 x 48 comes back as [64, 48, 4]), so the rotation is
    taken out of the file before, and applied here.
    """

    def __init__(self, data: bytes) -> None:
        import decord

        data, self.quarter_turns = without_rotation(data)
        try:
            self.video = decord.VideoReader(io.BytesIO(data), num_threads=1)
        except (decord.DECORDError, RuntimeError) as error:
            if "cannot find video stream" in str(error):
                raise Refused(NO_STREAM) from error
            # Among these are intact files that do not state their length, as browsers record them.
            raise Unreadable from error
        total = len(self.video)
        self.timestamps = self.video.get_frame_timestamp(range(total))[:, 0].astype(np.float64)
        if not (self.timestamps > -1e9).all():  # AVI files hold no times for frames out of order
            self.timestamps = np.arange(total) / self.video.get_avg_fps()
        height, width, _ = self.video[0].shape
        self.width, self.height = (height, width) if self.quarter_turns % 2 else (width, height)

    def frames(self, indices: list[int]) -> Iterator[np.ndarray]:
        """Yield uint8 [height, width, 3] for ascending indices."""
        for index in indices:
            yield np.rot90(self.video[index].asnumpy(), self.quarter_turns)


class PyAVReader:
    """Read frames by PyAV: one pass over the packets for the times, then seeks to key frames."""

    def __init__(self, data: bytes) -> None:
        import av

        self.container: Any = av.open(io.BytesIO(data), "r")
        if not self.container.streams.video:
            raise Refused(NO_STREAM)
        self.stream: Any = self.container.streams.video[0]
        packets = [(p.pts, p.is_keyframe) for p in self.container.demux(self.stream) if p.pts is not None]
        if not packets or self.stream.time_base is None:
            raise Refused("there are no frames in it")
        self.pts = sorted(pts for pts, _ in packets)
        self.key_pts = sorted(pts for pts, is_key in packets if is_key)
        self.timestamps = np.array(self.pts) * float(self.stream.time_base)
        self.container.seek(self.pts[0], stream=self.stream)
        first = next(self.container.decode(self.stream))
        self.stored_width, self.stored_height = first.width, first.height
        self.quarter_turns = round(first.rotation / 90) % 4
        is_lying = self.quarter_turns % 2
        self.width, self.height = (first.height, first.width) if is_lying else (first.width, first.height)

    def frames(self, indices: list[int]) -> Iterator[np.ndarray]:
        """Yield uint8 [height, width, 3] for ascending indices."""
        last = None  # pts of the frame decoded last
        for index in indices:
            wanted = self.pts[index]
            key = max((pts for pts in self.key_pts if pts <= wanted), default=self.pts[0])
            if last is None or key > last:
                self.container.seek(key, stream=self.stream)
                decoded = self.container.decode(self.stream)
            while last is None or last < wanted:
                frame = next(decoded)
                last = frame.pts
            # A stream may change its size on the way; all frames are given in the size of the first.
            image = frame.to_ndarray(format="rgb24", width=self.stored_width, height=self.stored_height)
            yield np.rot90(image, self.quarter_turns)


class PillowReader:
    """Read frames of a GIF, which decord does not read, by Pillow; transparent places become white."""

    def __init__(self, data: bytes) -> None:
        from PIL import GifImagePlugin, ImageSequence

        self.image = GifImagePlugin.GifImageFile(io.BytesIO(data))
        # Browsers, too, show a frame without a duration for a tenth of a second.
        durations = [frame.info.get("duration") or 100 for frame in ImageSequence.Iterator(self.image)]
        self.timestamps = np.cumsum([0, *durations[:-1]]) / 1000
        self.width, self.height = self.image.size

    def frames(self, indices: list[int]) -> Iterator[np.ndarray]:
        """Yield uint8 [height, width, 3] for ascending indices."""
        from PIL import Image

        for index in indices:
            self.image.seek(index)
            white = Image.new("RGBA", self.image.size, "white")
            yield np.asarray(Image.alpha_composite(white, self.image.convert("RGBA")).convert("RGB"))


READERS: dict[str, Callable[[bytes], Reader]] = {
    "decord": DecordReader,
    "pyav": PyAVReader,
    "pillow": PillowReader,
}


def open_video(data: bytes, names: list[str]) -> tuple[str, Reader]:
    """Open with the first library that can; return its name, too.

    Raises:
        Refused: there is no video in it.
        Unreadable: none of them can.
    """
    for name in names:
        try:
            return name, READERS[name](data)
        except Unreadable:
            continue
    raise Unreadable


def without_rotation(data: bytes) -> tuple[bytes, int]:
    """Remove the rotation of an MP4 or MOV file; return its quarter turns counter-clockwise."""
    one = 1 << 16
    for track_header in (
        header
        for movie in boxes(data, 0, len(data), b"moov")
        for track in boxes(data, *movie, b"trak")
        for header in boxes(data, *track, b"tkhd")
    ):
        start = track_header[0] + (52 if data[track_header[0]] == 1 else 40)  # version 1 has longer dates
        a, b = (int.from_bytes(data[start + i : start + i + 4], "big", signed=True) for i in (0, 4))
        quarter_turns = {(0, one): 3, (-one, 0): 2, (0, -one): 1}.get((a, b))
        if quarter_turns:
            identity = b"".join(n.to_bytes(4, "big") for n in (one, 0, 0, 0, one, 0, 0, 0, 1 << 30))
            return data[:start] + identity + data[start + 36 :], quarter_turns
    return data, 0


def boxes(data: bytes, start: int, end: int, kind: bytes) -> Iterator[tuple[int, int]]:
    """Yield start and end of the contents of each MP4 box of one kind, between two offsets."""
    while start + 8 <= end:
        size, header = int.from_bytes(data[start : start + 4], "big"), 8
        if size == 1:
            size, header = int.from_bytes(data[start + 8 : start + 16], "big"), 16
        stop = end if size == 0 else start + size
        if stop < start + header or stop > end:
            return
        if data[start + 4 : start + 8] == kind:
            yield start + header, stop
        start = stop


def limit_process(seconds: int, memory_bytes: int) -> None:
    """Bound what this process may take, where the system can: not on Windows, not the memory on macOS."""
    try:
        import resource
    except ImportError:
        return
    bounds = {
        resource.RLIMIT_CPU: seconds + 1,  # a child whose parent was killed must end too
        resource.RLIMIT_CORE: 0,
        resource.RLIMIT_FSIZE: 0,  # nothing to write but the pipe
    }
    if sys.platform != "darwin":
        bounds[resource.RLIMIT_AS] = memory_bytes
    for kind, bound in bounds.items():
        resource.setrlimit(kind, (bound, bound))


def main(arguments: list[str]) -> None:
    """Decode a video for the parent, by the exchange described above."""
    size, seconds, memory_bytes = (int(argument) for argument in arguments[:3])
    limit_process(seconds, memory_bytes)
    # The libraries print to stdout and stderr from C; only this copy of stdout reaches the parent.
    out: Any = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    data = sys.stdin.buffer.read(size)
    try:
        name, reader = open_video(data, arguments[3:])
    except Refused as refusal:
        out.write(json.dumps({"refused": str(refusal)}).encode() + b"\n")
        out.close()
        return
    header = {"reader": name, "width": reader.width, "height": reader.height, "total": len(reader.timestamps)}
    out.write(json.dumps(header).encode() + b"\n" + reader.timestamps.astype(np.float64).tobytes())
    out.flush()
    for frame in reader.frames(json.loads(sys.stdin.buffer.readline() or "[]")):
        out.write(np.ascontiguousarray(frame).data)
    out.close()


if __name__ == "__main__":
    main(sys.argv[1:])
