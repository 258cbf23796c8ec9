"""Downloads of images and videos from public addresses, protected against server-side request forgery.

The host name is resolved once, every resolved address must be public, and the connection uses that address:
a second lookup, a redirect or a proxy could lead elsewhere (vLLM CVE-2025-6242, CVE-2026-24779,
CVE-2026-25960). Proxy settings of the environment are therefore ignored.
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

_RULE = "must be an https:// or http:// URL of a public server"
_PORTS = {"https": 443, "http": 80}
_NAT64 = ipaddress.ip_network("64:ff9b::/96")
# Not public although `ipaddress` calls them global: Azure's metadata service, and ranges that only later
# versions of Python know.
_NOT_PUBLIC = [
    ipaddress.ip_network(network)
    for network in (
        *("168.63.129.16/32", "192.0.0.0/24"),
        *("64:ff9b:1::/48", "3fff::/20", "5f00::/16", "fec0::/10"),
    )
]
_CHUNK = 2**16


def fetch(url: str, *, argument: str = "url", limits: MediaLimits = DEFAULT_LIMITS) -> bytes:
    """Download the body of a public http(s) URL.

    Args:
        url: absolute ASCII URL (international names in their xn-- form), without user name or password.
        argument: name of the argument in error messages.
        limits: limits; `max_fetch_bytes`, `connect_timeout_s` and `fetch_timeout_s` apply.

    Raises:
        MediaError: the scheme is not http(s), an address is not public, the status is not 200 (redirects are
            not followed), the body is compressed, too large or incomplete, a timeout expired, or
            `HF_HUB_OFFLINE=1` is set.
    """
    parts = _parse(url, argument)
    if os.environ.get("HF_HUB_OFFLINE", "").upper() in {"1", "ON", "YES", "TRUE"}:
        rule = "cannot be downloaded while HF_HUB_OFFLINE is set; unset it, or pass a local file"
        raise MediaError(argument, url, rule)
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
            raise MediaError(argument, url, f"cannot be downloaded ({type(error).__name__})") from error
        body = b""
    # Checked after a successful read too: shutting the connection looks like the end of a body.
    if time.monotonic() >= deadline:
        rule = limits.rule("fetch_timeout_s", "must be downloaded within at most {} seconds")
        raise MediaError(argument, url, rule)
    return body


def _parse(url: str, argument: str) -> urllib.parse.SplitResult:
    # urlsplit drops tabs and line breaks, and browsers read a backslash as a slash; URLs that two parsers
    # could read differently are refused
    if len(url) > 8000 or not url.isascii() or any(char <= " " or char in "\\\x7f" for char in url):
        rule = "must be a URL of up to 8,000 ASCII characters, without spaces or backslashes"
        raise MediaError(argument, url, rule)
    try:
        parts = urllib.parse.urlsplit(url)
        port = parts.port
    except ValueError as error:
        raise MediaError(argument, url, "must be a valid URL") from error
    if parts.scheme not in _PORTS:
        raise MediaError(argument, url, _RULE)
    if "@" in parts.netloc:
        got = Described("a URL with a user name or password")
        raise MediaError(argument, got, "must be a URL without user name and password")
    if not parts.hostname or port == 0:
        raise MediaError(argument, url, f"{_RULE}; its server is missing")
    return parts


def _is_public(address: str) -> bool:
    ip = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(ip, ipaddress.IPv6Address):
        # Addresses that embed an IPv4 address lead to it.
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
    # The system's resolver also accepts 2130706433, 0177.1 and 0x7f.1; the filter sees the resolved address.
    answers = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    for *_, address in answers:
        if not _is_public(str(address[0])):
            raise MediaError(argument, parts.geturl(), f"{_RULE}; its server has a private address")
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
        rule = limits.rule("connect_timeout_s", "must accept a connection within at most {} seconds")
        raise MediaError(argument, parts.geturl(), rule) from failure
    raise failure


@contextlib.contextmanager
def _cut_off(sock: socket.socket, deadline: float) -> Iterator[None]:
    """Shut the connection at the deadline; the timeout of a socket restarts with every byte."""
    # a TLS socket must not be shut from another thread, but a duplicate of the plain socket may
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
    url, rule = parts.geturl(), limits.rule("max_fetch_bytes", "must have a body of at most {} bytes")
    sock.settimeout(limits.fetch_timeout_s)
    connection = http.client.HTTPConnection(parts.hostname or "")
    connection.sock = sock  # already connected, so that http.client resolves nothing
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
            rule = f"must be the final URL; redirects (status {response.status}) are not followed"
            raise MediaError(argument, url, rule)
        if response.status != 200:
            raise MediaError(argument, url, f"cannot be downloaded; the server sent status {response.status}")
        if response.getheader("Content-Encoding", "identity").lower() != "identity":
            raise MediaError(argument, url, "must have a body without compression")
        promised = response.length
        if promised is not None and promised > limits.max_fetch_bytes:
            raise MediaError(argument, Described(f"a body of {promised:,} bytes"), rule)
        body = bytearray()
        while chunk := response.read1(_CHUNK):
            body += chunk
            if len(body) > limits.max_fetch_bytes:
                raise MediaError(argument, Described(f"a body of {len(body):,} bytes or more"), rule)
    if promised is not None and len(body) != promised:
        got = f"was downloaded incompletely; the body ended after {len(body):,} of {promised:,} bytes"
        raise MediaError(argument, url, got)
    return bytes(body)
