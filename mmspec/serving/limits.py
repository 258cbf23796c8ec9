"""Limits of the server: sizes, numbers and timeouts. The error for a limit names its field."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from mmspec.errors import InputError, shorten
from mmspec.media import MediaLimits
from mmspec.serving.errors import RequestError

__all__ = ["ServerLimits", "check_at_most"]


@dataclass(frozen=True)
class ServerLimits:
    """Limits on every request.

    Args:
        max_body_bytes: size of the request body, checked while it is read.
        max_images: number of images in the messages of one request.
        max_tokens: largest `max_tokens` of a request. A request without `max_tokens` uses the value of the
            model's generation config, or 256.
        max_choices: number of answers or images of one request (`n`).
        max_waiting: number of rows that wait for a free row in the batch; further ones are refused.
        wait_seconds: seconds without a row entering the batch after which waiting requests fail. By default
            as long as `run_seconds`, after which every row is free.
        run_seconds: seconds after which a running request fails.
        idle_seconds: seconds for a client to send its body, or to read a part of the response.
        url_hosts: host names from which images may be downloaded. "*" allows every public host; by default
            there are none.
        media: limits on each image.

    Raises:
        InputError: a limit is not above 0, or a host is not a host name.
    """

    max_body_bytes: int = 32_000_000
    max_images: int = 8
    max_tokens: int = 4096
    max_choices: int = 10
    max_waiting: int = 64
    wait_seconds: float = 300
    run_seconds: float = 300
    idle_seconds: float = 15
    url_hosts: frozenset[str] = frozenset()
    media: MediaLimits = field(default_factory=lambda: MediaLimits(max_bytes=10_000_000))

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise InputError(one.name, value, "must be a finite number above 0")
        for host in self.url_hosts:
            if not host or "/" in host or ":" in host:
                rule = "must be a host name, such as example.org, or *"
                raise InputError("--allow-url-domain", host, rule)


def check_at_most(name: str, value: int, limit: str, most: int) -> None:
    """Raise RequestError if a field exceeds its limit."""
    if value > most:
        text = f"{name} must be at most {most} ({limit}); got {shorten(value)}"
        raise RequestError(400, text, name)
