"""OpenAI's messages as the pipelines take them: images loaded within limits, and from no local path."""

from __future__ import annotations

import urllib.parse
from collections.abc import Sequence
from typing import Any

from mmspec.media import load_image
from mmspec.serving.errors import RequestError
from mmspec.serving.limits import ServerLimits
from mmspec.serving.schemas import ImagePart, Message

__all__ = ["read_messages"]


def read_messages(messages: Sequence[Message], limits: ServerLimits) -> list[dict[str, Any]]:
    """Load the images of a conversation and put it into the form of `VisionLanguagePipeline`.

    Raises:
        RequestError: too many images, or a URL that is not allowed.
        MediaError: an image that cannot be read, or is over a limit.
    """
    parts = [part for message in messages if not isinstance(message.content, str) for part in message.content]
    images = sum(isinstance(part, ImagePart) for part in parts)
    if images > limits.max_images:
        text = f"messages: got {images} images; at most {limits.max_images} (max_images)"
        raise RequestError(400, text, "messages")
    read = []
    for turn, message in enumerate(messages):
        role = "system" if message.role == "developer" else message.role
        content = message.content
        given: list[dict[str, Any]] = []
        if isinstance(content, str):
            given.append({"type": "text", "text": content})
        else:
            for index, part in enumerate(content):
                if isinstance(part, ImagePart):
                    where = f"messages[{turn}].content[{index}].image_url.url"
                    check_url(part.image_url.url, where, limits)
                    image = load_image(part.image_url.url, argument=where, limits=limits.media)
                    given.append({"type": "image", "image": image})
                else:
                    given.append({"type": "text", "text": part.text})
        read.append({"role": role, "content": given})
    return read


def check_url(url: str, where: str, limits: ServerLimits) -> None:
    """Raise RequestError for what is neither a `data:` URL nor a URL of an allowed server."""
    if url[:5].lower() == "data:":
        return
    if not url.lower().startswith(("https://", "http://")):  # above all no path of this machine
        raise RequestError(400, f"{where}: pass a data: URL, or an https:// or http:// URL", where)
    if "*" in limits.url_hosts:
        return
    try:
        host = urllib.parse.urlsplit(url).hostname or ""
    except ValueError:
        host = ""
    if host not in limits.url_hosts:
        text = f"{where}: this server does not fetch from there; pass a data: URL (--allow-url-domain)"
        raise RequestError(400, text, where)
