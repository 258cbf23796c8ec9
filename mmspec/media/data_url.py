"""Images as `data:` URLs, for pages that load nothing from elsewhere."""

from __future__ import annotations

import base64
import io
from typing import Any

from PIL import Image

__all__ = ["data_url", "encode_image"]


def data_url(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    """Encode an image as a `data:` URL; arguments as of `encode_image`."""
    return f"data:image/{kind.lower()};base64,{encode_image(image, kind, **options)}"


def encode_image(image: Image.Image, kind: str = "PNG", **options: Any) -> str:
    """Encode an image as the base64 of a file.

    Args:
        image: any mode that the kind of file takes.
        kind: Pillow's name of the format.
        options: of Pillow's `save`, such as `quality`.
    """
    file = io.BytesIO()
    image.save(file, kind, **options)
    return base64.b64encode(file.getvalue()).decode()
