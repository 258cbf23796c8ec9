"""Web pages that may read answers: the headers by which browsers let them."""

from __future__ import annotations

import re
from collections.abc import Sequence

from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from mmspec.errors import InputError

__all__ = ["allow_origins", "read_origin"]

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
USUAL_PORTS = {"http": ":80", "https": ":443"}


def allow_origins(app: ASGIApp, origins: Sequence[str]) -> ASGIApp:
    """Put an application behind the headers that let pages of some origins read its answers.

    What browsers ask before a request is answered here, before any API key is asked for: they never send one.

    Args:
        app: the application; returned as it is if no origin may.
        origins: as `read_origin` returns them.
    """
    if not origins:
        return app
    return CORSMiddleware(
        app,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After", "X-Request-ID"],
    )


def read_origin(origin: str) -> str:
    """Return an origin as browsers write it: in lower case, without the usual port.

    Raises:
        InputError: it is neither * nor a scheme and a host.
    """
    written = origin.lower()
    if written == "*":
        return written
    if not ORIGIN.fullmatch(written):
        allowed = "scheme, host and port of a page, such as http://localhost:3000, without a path; or *"
        raise InputError("--allow-origin", origin, allowed)
    scheme = written.partition(":")[0]
    return written.removesuffix(USUAL_PORTS.get(scheme, ""))
