"""Program that decodes a video or audio with PyAV in its own process; a bad file can only kill that process.

It imports nothing from mmspec, so that it starts fast, and applies only the limits of the process. Protocol,
with numbers in the machine's byte order:

    parent: one line of JSON, {"size", "kind": "video"} or {"size", "kind": "audio", "rate", "most"}
    parent: the bytes of the file, `size` of them

A video:

    child:  one line of JSON, {"width", "height", "total"} or {"refused": rule}
    child:  float64 timestamps [total]
    parent: one line of JSON: indices of the wanted frames, in ascending order
    child:  uint8 frames [height, width, 3], one after the other

Audio, of which the child decodes at most `most` samples and one more:

    child:  one line of JSON, {"total"} or {"refused": rule}
    child:  float32 samples [total], the mean of the channels at `rate` samples per second
"""

from __future__ import annotations

import io
import itertools
import json
import os
import signal
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np

Matrix = tuple[float, float, float, float]
"""(a, b, c, d) of a display matrix: the pixel (x, y) is shown at (a x + c y, b x + d y), up to a shift."""
IDENTITY: Matrix = (1, 0, 0, 1)
ONE = 1 << 16  # the fixed-point 1 of a display matrix
ESTIMATED = ("mp3", "aac")  # formats without a duration; FFmpeg estimates it from the first frames
NO_STREAM = "must contain {} stream; it has none or is truncated"


class Refused(Exception):
    """The file is intact but has no frames or samples; the message is the rule of the parent's error."""


class TooLong(Exception):
    """The header of an audio file states more samples than are allowed."""


class PyAVReader:
    """PyAV reader: one pass over the packets for the timestamps, then seeks to key frames.

    Transparent pixels of a GIF become white, the colour that FFmpeg reports for them.

    Attributes:
        timestamps: float64 [total], ascending times in seconds at which the frames are shown.
        width, height: size of a frame as shown, after rotation and mirroring.
    """

    def __init__(self, data: bytes) -> None:
        import av

        self.container: Any = av.open(io.BytesIO(data), "r")
        if not self.container.streams.video:
            raise Refused(NO_STREAM.format("a video"))
        self.stream: Any = self.container.streams.video[0]
        packets = [
            (packet.pts, packet.is_keyframe, packet.is_discard)  # discarded by an edit list
            for packet in self.container.demux(self.stream)
            if packet.pts is not None
        ]
        self.pts = sorted(pts for pts, _, is_discarded in packets if not is_discarded)
        if not self.pts or self.stream.time_base is None:
            raise Refused("must contain frames")
        self.key_pts = sorted(pts for pts, is_key, _ in packets if is_key)
        self.timestamps = np.array(self.pts) * float(self.stream.time_base)
        self.container.seek(self.pts[0], stream=self.stream)
        first: Any = next(self.container.decode(self.stream))
        self.stored_width, self.stored_height = first.width, first.height
        self.matrix = IDENTITY
        display_matrix = first.side_data.get("DISPLAYMATRIX")
        if display_matrix is not None:
            a, b, c, d = np.frombuffer(display_matrix, np.int32)[[0, 1, 3, 4]] / ONE
            self.matrix = a, b, c, d
        sides = (first.width, first.height)
        self.width, self.height = sides[::-1] if is_lying(self.matrix) else sides

    def frames(self, indices: list[int]) -> Iterator[np.ndarray]:
        """Yield uint8 [height, width, 3] for ascending indices."""
        last = None  # pts of the last decoded frame
        for index in indices:
            wanted = self.pts[index]
            key = max((pts for pts in self.key_pts if pts <= wanted), default=self.pts[0])
            if last is None or key > last:
                self.container.seek(key, stream=self.stream)
                decoded = self.container.decode(self.stream)
            while last is None or last < wanted:
                frame = next(decoded)
                last = frame.pts
            # A stream may change its size; all frames are scaled to the size of the first.
            image = frame.to_ndarray(format="rgb24", width=self.stored_width, height=self.stored_height)
            yield upright(image, self.matrix)


def upright(frame: np.ndarray, matrix: Matrix) -> np.ndarray:
    """Rotate and mirror a frame [H, W, 3] as FFmpeg does, by the nearest of the eight orientations."""
    a, b, c, d = matrix
    if is_lying(matrix):
        frame, a, d = frame.swapaxes(0, 1), c, b
    return frame[:: -1 if d < 0 else 1, :: -1 if a < 0 else 1]


def is_lying(matrix: Matrix) -> bool:
    """Whether a display matrix shows rows as columns."""
    a, b, c, d = matrix
    return abs(b) + abs(c) > abs(a) + abs(d)


def mono_samples(data: bytes, rate: int, most: int) -> np.ndarray:
    """Decode the first audio stream: float32 [n], n at most `most` + 1.

    Raises:
        Refused: the file has no audio stream.
        TooLong: by its header, the stream has more samples; it was not decoded.
    """
    import av

    with av.open(io.BytesIO(data), "r") as container:
        if not container.streams.audio:
            raise Refused(NO_STREAM.format("an audio"))
        stream = container.streams.audio[0]
        if stream.duration and stream.time_base and container.format.name not in ESTIMATED:
            stated = float(stream.duration * stream.time_base) * rate
            if stated > most + rate:  # a second more, because times may be rounded
                raise TooLong
        resampler = av.AudioResampler(format="fltp", rate=rate)  # keeps the channels
        pieces: list[np.ndarray] = []
        count = 0
        decoded = itertools.chain(container.decode(stream), (None,))  # None flushes
        for frame in itertools.chain.from_iterable(map(resampler.resample, decoded)):
            pieces.append(frame.to_ndarray().mean(axis=0))
            count += len(pieces[-1])
            if count > most:
                break
    return np.concatenate(pieces)[: most + 1] if pieces else np.zeros(0, np.float32)


def limit_process(seconds: float, memory_bytes: int) -> None:
    """Limit processor time and memory of this process; not on Windows, and not the memory on macOS."""
    try:
        import resource
    except ImportError:
        return
    # RLIMIT_CPU has whole seconds only.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)  # ends the process, also if the parent ignores it
    signal.setitimer(signal.ITIMER_PROF, seconds)
    bounds = {
        resource.RLIMIT_CORE: (0, 0),
        resource.RLIMIT_FSIZE: (0, 0),  # it writes to the pipe alone
    }
    if sys.platform != "darwin":
        bounds[resource.RLIMIT_AS] = (memory_bytes, memory_bytes)
    for kind, bound in bounds.items():
        resource.setrlimit(kind, bound)


def main(arguments: list[str]) -> None:
    """Decode a file for the parent, by the protocol above."""
    seconds, memory_bytes = arguments
    limit_process(float(seconds), int(memory_bytes))
    # C libraries print to stdout and stderr; only this copy of stdout reaches the parent.
    out: Any = os.fdopen(os.dup(1), "wb")
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)

    request = json.loads(sys.stdin.buffer.readline())
    data = sys.stdin.buffer.read(request["size"])
    try:
        if request["kind"] == "audio":
            send_audio(data, request["rate"], request["most"], out)
        else:
            send_video(data, out)
    except Refused as refusal:
        send_line({"refused": str(refusal)}, out)
    out.close()


def send_line(value: object, out: Any) -> None:
    """Send a value as one line of JSON."""
    out.write(json.dumps(value).encode() + b"\n")


def send_audio(data: bytes, rate: int, most: int, out: Any) -> None:
    """Send the samples of an audio file."""
    try:
        samples = mono_samples(data, rate, most)
    except TooLong:
        send_line({"total": most + 1}, out)  # the parent reads no samples
        return
    send_line({"total": len(samples)}, out)
    out.write(samples.astype(np.float32).data)


def send_video(data: bytes, out: Any) -> None:
    """Send size and timestamps of a video, and then the frames that the parent wants."""
    reader = PyAVReader(data)
    send_line({"width": reader.width, "height": reader.height, "total": len(reader.timestamps)}, out)
    out.write(reader.timestamps.astype(np.float64).data)
    out.flush()
    for frame in reader.frames(json.loads(sys.stdin.buffer.readline() or "[]")):
        out.write(np.ascontiguousarray(frame).data)


if __name__ == "__main__":
    main(sys.argv[1:])
