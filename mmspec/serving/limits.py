"""Limits of the server: sizes, numbers, waiting times. Each error that a limit causes names its field."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, fields

from mmspec.errors import InputError, shorten
from mmspec.media import MediaLimits
from mmspec.serving.errors import RequestError

__all__ = ["ServerLimits", "check_at_most"]


@dataclass(frozen=True)
class ServerLimits:
    """Limits that every request is held to.

    Args:
        max_body_bytes: of a request, counted while it is read.
        max_images: in the messages of one request.
        max_tokens: that a request may ask for; one that names no number gets what the model's generation
            config says, or 256.
        max_choices: answers or images of one request (`n`).
        max_waiting: rows that may wait for a place in the batch.
        wait_seconds: until a request that waits is given up.
        run_seconds: until a request that is in the batch is given up.
        idle_seconds: for a client to send its body, or to read what it was sent.
        url_hosts: servers that images may be fetched from; "*" is every public one, none is the default.
        media: limits of each image.

    Raises:
        InputError: a limit that is not above 0, or a host that is no name.
    """

    max_body_bytes: int = 32_000_000
    max_images: int = 8
    max_tokens: int = 4096
    max_choices: int = 10
    max_waiting: int = 64
    wait_seconds: float = 30
    run_seconds: float = 300
    idle_seconds: float = 15
    url_hosts: frozenset[str] = frozenset()
    media: MediaLimits = field(default_factory=lambda: MediaLimits(max_bytes=10_000_000))

    def __post_init__(self) -> None:
        for one in fields(self):
            value = getattr(self, one.name)
            if isinstance(value, int | float) and not 0 < value < math.inf:
                raise InputError(one.name, value, "a finite number above 0")
        for host in self.url_hosts:
            if not host or "/" in host or ":" in host:
                raise InputError(
                    "--allow-url-domain", host, "the name of a server, such as example.org, or *"
                )


def check_at_most(name: str, value: int, limit: str, most: int) -> None:
    """Raise RequestError for a field above its limit."""
    if value > most:
        raise RequestError(400, f"{name}: got {shorten(value)}; at most {most} ({limit})", name)
