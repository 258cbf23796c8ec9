"""Download an image or video from a public address, with every known way to abuse that closed.

The name is resolved once, every answer must be a public address, and the connection goes to that very
address: a second lookup, a redirect or a proxy could point elsewhere (vLLM CVE-2025-6242, CVE-2026-24779,
CVE-2026-25960). Proxy settings of the environment are therefore not used.
"""

from __future__ import annotations

import contextlib
import http.client
import ipaddress
import os
import socket
import ssl
import threading
import time
import urllib.parse
from collections.abc import Iterator

from mmspec.errors import MediaError
from mmspec.media.limits import DEFAULT_LIMITS, Described, MediaLimits

__all__ = ["fetch"]

_ALLOWED = "pass an https:// or http:// URL of a public server"
_PORTS = {"https": 443, "http": 80}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# What `ipaddress` calls global and is not: the metadata service of Azure, and ranges that only later Pythons
# know.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        *("168.63.129.16/32", "192.0.0.0/24"),
        *("64:ff9b:1::/48", "3fff::/20", "5f00::/16", "fec0::/10"),
    )
]
_CHUNK = 2**16


def fetch(url: str, *, argument: str = "url", limits: MediaLimits = DEFAULT_LIMITS) -> bytes:
    """Download the body that a public http(s) URL answers with.

    Args:
        url: an absolute URL in ASCII (international names in their xn-- form), without user name or password.
        argument: the argument that errors name.
        limits: `max_fetch_bytes`, `connect_timeout_s` and `fetch_timeout_s` apply.

    Raises:
        MediaError: another scheme, an address that is not public, a redirect or another status than 200, a
            compressed or oversized or incomplete body, a limit of time, or `HF_HUB_OFFLINE=1` in the
            environment.
    """
    parts = _parse(url, argument)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        raise MediaError(argument, url, "HF_HUB_OFFLINE forbids downloads; unset it, or pass a local file")
    deadline = time.monotonic() + limits.fetch_timeout_s
    try:
        with (
            contextlib.closing(_connect(parts, argument, limits, deadline)) as sock,
            _cut_off(sock, deadline),
        ):
            body = _request(sock, parts, argument, limits)
    except MediaError:
        raise
    except (OSError, http.client.HTTPException, ValueError) as error:
        if time.monotonic() < deadline:
            raise MediaError(argument, url, f"the download failed ({type(error).__name__})") from error
        body = b""
    # Asked also when reading ended quietly, since cutting off looks like the end of a body.
    if time.monotonic() >= deadline:
        raise MediaError(argument, url, limits.allows("fetch_timeout_s", "seconds for a download"))
    return body


def _parse(url: str, argument: str) -> urllib.parse.SplitResult:
    # urlsplit drops tabs and line breaks, and browsers read a backslash as a slash: what looks different to
    # two parsers is refused before there is a second one.
    if len(url) > 8000 or not url.isascii() or any(char <= " " or char in "\\\x7f" for char in url):
        allowed = "a URL has up to 8,000 ASCII characters, without spaces or backslashes"
        raise MediaError(argument, url, allowed)
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaError(argument, url, "this is not a valid URL") from error
    if parts.scheme not in _PORTS:
        raise MediaError(argument, url, _ALLOWED)
    if "@" in parts.netloc:
        raise MediaError(argument, Described("a URL with a user name or password"), "pass a URL without them")
    if not parts.hostname or port == 0:
        raise MediaError(argument, url, f"the server is missing; {_ALLOWED}")
    return parts


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        # Addresses that carry an IPv4 address reach that one.
        embedded = ip.ipv4_mapped or ip.sixtofour or (ip.teredo[1] if ip.teredo else None)
        if ip in _NAT64:
            embedded = ipaddress.IPv4Address(int(ip) & 0xFFFFFFFF)
        ip = embedded or ip
    is_listed = any(ip in network for network in _NOT_PUBLIC)
    return ip.is_global and not (ip.is_multicast or ip.is_reserved or is_listed)


def _connect(
    parts: urllib.parse.SplitResult, argument: str, limits: MediaLimits, deadline: float
) -> socket.socket:
    host, port = parts.hostname or "", parts.port or _PORTS[parts.scheme]
    # The system's resolver also reads 2130706433, 0177.1 and 0x7f.1, so the filter sees what would be
    # connected to.
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, address in answers:
        if not _is_public(str(address[0])):
            raise MediaError(argument, parts.geturl(), f"its server is at a private address; {_ALLOWED}")
    failure: OSError = OSError("no address")
    for family, kind, protocol, _, address in answers:
        if time.monotonic() >= deadline:
            break
        sock = socket.socket(family, kind, protocol)
        try:
            sock.settimeout(limits.connect_timeout_s)
            sock.connect(address)
            if parts.scheme == "https":
                return ssl.create_default_context().wrap_socket(sock, server_hostname=host)
            return sock
        except OSError as error:
            sock.close()
            failure = error
    if isinstance(failure, TimeoutError):
        allowed = limits.allows("connect_timeout_s", "seconds to connect")
        raise MediaError(argument, parts.geturl(), allowed) from failure
    raise failure


@contextlib.contextmanager
def _cut_off(sock: socket.socket, deadline: float) -> Iterator[None]:
    """Shut the connection at the deadline; a timeout of the socket would start anew with every byte."""
    # a TLS socket must not be shut from another thread
    same = socket.fromfd(sock.fileno(), sock.family, sock.type)

    def shut() -> None:
        with contextlib.suppress(OSError):
            same.shutdown(socket.SHUT_RDWR)

    timer = threading.Timer(deadline - time.monotonic(), shut)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        same.close()


def _request(
    sock: socket.socket, parts: urllib.parse.SplitResult, argument: str, limits: MediaLimits
) -> bytes:
    url, allowed = parts.geturl(), limits.allows("max_fetch_bytes", "bytes")
    sock.settimeout(limits.fetch_timeout_s)
    connection = http.client.HTTPConnection(parts.hostname or "")
    connection.sock = sock  # already connected: http.client resolves nothing itself
    target = urllib.parse.urlunsplit(("", "", parts.path or "/", parts.query, ""))
    headers = {
        "Host": parts.netloc,
        "User-Agent": "mmspec",
        "Accept": "image/*, video/*",
        "Connection": "close",
    }
    connection.request("GET", target, headers=headers)  # http.client adds Accept-Encoding: identity
    with connection.getresponse() as response:
        if 300 <= response.status < 400:
            allowed = f"status {response.status}: redirects are not followed; pass the final URL"
            raise MediaError(argument, url, allowed)
        if response.status != 200:
            raise MediaError(argument, url, f"the server answered with status {response.status}")
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise MediaError(argument, url, "the server sent a compressed body, which is not unpacked")
        promised = response.length
        if promised is not None and promised > limits.max_fetch_bytes:
            raise MediaError(argument, Described(f"a body of {promised:,} bytes"), allowed)
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            if len(body) > limits.max_fetch_bytes:
                raise MediaError(argument, Described(f"a body of {len(body):,} bytes or more"), allowed)
    if promised is not None and len(body) != promised:
        raise MediaError(argument, url, f"the body ended after {len(body):,} of {promised:,} bytes")
    return bytes(body)
