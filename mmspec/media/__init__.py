"""Image, video and audio loading from files, bytes, arrays and URLs, within limits; does not import torch."""

from mmspec.media.audio import load_audio, read_audio_file
from mmspec.media.fetch import fetch
from mmspec.media.images import image_grid, load_image, load_images
from mmspec.media.limits import DEFAULT_LIMITS, MediaLimits
from mmspec.media.video import Video, load_video

__all__ = [
    "DEFAULT_LIMITS",
    "MediaLimits",
    "Video",
    "fetch",
    "image_grid",
    "load_audio",
    "load_image",
    "load_images",
    "load_video",
    "read_audio_file",
]
