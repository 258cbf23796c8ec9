"""Load images and videos from anywhere: one exception class, limits first, nothing that can hang.

`load_image`, `load_images` and `load_video` take whatever a caller is likely to have; `fetch` downloads;
`MediaLimits` holds every limit. Importing this imports neither torch nor a video library.
"""

from mmspec.media.fetch import fetch
from mmspec.media.images import load_image, load_images
from mmspec.media.limits import DEFAULT_LIMITS, MediaLimits
from mmspec.media.video import Video, load_video

__all__ = ["DEFAULT_LIMITS", "MediaLimits", "Video", "fetch", "load_image", "load_images", "load_video"]
