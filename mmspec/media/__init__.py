"""Load images and videos from anywhere, within limits, with one exception class; imports no torch."""

from mmspec.media.fetch import fetch
from mmspec.media.images import load_image, load_images
from mmspec.media.limits import DEFAULT_LIMITS, MediaLimits
from mmspec.media.video import Video, load_video

__all__ = ["DEFAULT_LIMITS", "MediaLimits", "Video", "fetch", "load_image", "load_images", "load_video"]
