"""Uploads of visitors, whose size and format are checked before anything is decoded."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from mmspec.errors import MediaError
from mmspec.media import MediaLimits, load_audio, load_image, load_video
from mmspec.open_types import Keywords

__all__ = ["UPLOAD_LIMITS", "Upload", "read_upload"]

UPLOAD_LIMITS = MediaLimits(
    max_bytes=10_000_000,
    max_pixels=2**24,
    max_video_bytes=20_000_000,
    max_video_seconds=120,
    max_frames=16,
    max_video_pixels=2**26,
    max_audio_bytes=20_000_000,
    max_audio_seconds=120,
)
#: Samples a second of a recording while it is only checked.
LOWEST_RATE = 8000


@dataclass(frozen=True)
class Upload:
    """A readable file, its kind ("image", "video" or "audio"), and its number of frames."""

    kind: str
    path: str
    frames: int = 1

    def media(self, frames: int, *, takes_videos: bool) -> Keywords:
        """Arguments of a pipeline's call; models without a video input receive frames as images."""
        if self.kind == "image":
            return {"images": [self.path]}
        count = min(frames, self.frames)
        if takes_videos:
            return {"videos": [self.path], "num_frames": count}
        return {"images": list(load_video(self.path, num_frames=count, limits=UPLOAD_LIMITS).frames)}


def read_upload(kind: str, payload: Mapping[str, object] | None) -> Upload | None:
    """Check an uploaded file from an event without preprocessing; None without a file.

    Raises:
        MediaError: the file is unreadable or over a limit; the message contains its original name.
    """
    if payload is None:
        return None
    path = payload.get("path")
    if not isinstance(path, str):
        raise MediaError(kind, path, "must be an uploaded file")
    name = Path(str(payload.get("orig_name") or path)).name
    if kind == "image":
        load_image(path, argument=name, limits=UPLOAD_LIMITS)
        return Upload(kind, path)
    if kind == "audio":
        load_audio(path, sampling_rate=LOWEST_RATE, argument=name, limits=UPLOAD_LIMITS)
        return Upload(kind, path)
    video = load_video(path, num_frames=1, argument=name, limits=UPLOAD_LIMITS)
    return Upload(kind, path, video.total_num_frames)
