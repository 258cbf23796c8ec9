"""Downloads: allowed and refused addresses, and servers with wrong or slow answers."""

from __future__ import annotations

import gzip
import shutil
import socket
import ssl
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from mmspec.errors import MediaError
from mmspec.media import MediaLimits, fetch, load_image
from tests.media.files import encoded
from tests.media.network import Handler, OutsideWorldError, answer, only_local_connections, server

SHORT = MediaLimits(fetch_timeout_s=0.5, connect_timeout_s=0.5, max_fetch_bytes=100_000)
# Where time is not what is tested: machines that test are busy.
PATIENT = MediaLimits(max_fetch_bytes=100_000)
PUBLIC = "93.184.216.34"


@pytest.fixture(autouse=True)
def connections(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[object]]:
    monkeypatch.delenv("HF_HUB_OFFLINE", raising=False)
    with only_local_connections() as tried:
        yield tried


@pytest.fixture
def local_is_public(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lift the address filter, for tests of what happens after it."""
    monkeypatch.setattr(sys.modules["mmspec.media.fetch"], "_is_public", lambda address: True)


def resolve_to(monkeypatch: pytest.MonkeyPatch, *answers: list[str]) -> list[str]:
    """Let name lookups return these addresses, one list per lookup; return the list of names looked up."""
    asked: list[str] = []

    def getaddrinfo(host: str, port: int, *_: Any, **__: Any) -> list[Any]:
        asked.append(host)
        addresses = answers[min(len(asked), len(answers)) - 1]
        return [
            (
                socket.AF_INET6 if ":" in address else socket.AF_INET,
                socket.SOCK_STREAM,
                6,
                "",
                (address, port, 0, 0) if ":" in address else (address, port),
            )
            for address in addresses
        ]

    monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
    return asked


NUMERIC_PRIVATE = [
    "127.0.0.1", "127.1", "127.0.1", "0.0.0.0", "0", "10.0.0.1", "172.16.0.1", "192.168.1.1",
    "169.254.169.254", "100.64.0.1", "100.100.100.200", "192.0.0.192", "168.63.129.16", "224.0.0.1",
    "240.0.0.1", "255.255.255.255", "198.18.0.1", "2130706433", "017700000001", "0177.0.0.1", "0x7f000001",
    "0x7f.1", "0x7f.0x0.0x0.0x1", "2852039166", "[::1]", "[::]", "[::127.0.0.1]", "[::ffff:127.0.0.1]",
    "[::ffff:7f00:1]", "[::ffff:a9fe:a9fe]", "[0:0:0:0:0:ffff:10.0.0.1]", "[fc00::1]", "[fd00:ec2::254]",
    "[fe80::1]", "[ff02::1]", "[64:ff9b::7f00:1]", "[64:ff9b::10.0.0.1]", "[2002:7f00:1::]",
    "[2002:a9fe:a9fe::1]", "[2001:db8::1]", "[100::1]", "[fec0::1]", "[3fff::1]", "[64:ff9b:1::7f00:1]",
    "[2001:0:4136:e378:8000:63bf:80ff:fffe]", "localhost", "LOCALHOST", "localhost.",
]  # fmt: skip


def test_private_addresses_are_refused_before_connecting(connections: list[object]) -> None:
    for index, host in enumerate(NUMERIC_PRIVATE):
        with pytest.raises(MediaError, match=r"private address|cannot be downloaded \(gaierror\)"):
            fetch(f"{('http', 'https')[index % 2]}://{host}:8080/a.png", limits=SHORT)
        assert connections == [], host


def test_public_names_at_private_addresses_are_refused(
    monkeypatch: pytest.MonkeyPatch, connections: list[object]
) -> None:
    said = r"^images\[1\] must be .* its server has a private address; got 'https://example.test/a.png'"
    for addresses in (["10.0.0.1"], [PUBLIC, "10.0.0.1"], ["::ffff:10.0.0.1"], ["fe80::1%eth0"]):
        resolve_to(monkeypatch, addresses)
        with pytest.raises(MediaError, match=said):
            fetch("https://example.test/a.png", argument="images[1]")
        assert connections == [], addresses


def test_a_second_answer_of_the_name_server_is_never_asked_for(
    monkeypatch: pytest.MonkeyPatch, connections: list[object]
) -> None:
    asked = resolve_to(monkeypatch, [PUBLIC], ["127.0.0.1"])
    with pytest.raises(OutsideWorldError):
        fetch("http://rebinding.test/a.png", limits=SHORT)
    assert asked == ["rebinding.test"] and connections == [(PUBLIC, 80)]


STRANGE = [
    "ftp://example.com/a", "file:///etc/passwd", "gopher://example.com/", "javascript://x",
    "https:/example.com", "https://", "https:///path", "https://:443/", "https://user@example.com/",
    "https://user:secret@example.com/", "https://example.com@127.0.0.1/",
    "https://example.com\\@127.0.0.1/", "https://example.com/\\..\\x", "https://exam\tple.com/",
    "https://example.com/a b", "https://example.com/\r\nX: y", "https://example.com:99999/",
    "https://example.com:0/", "https://example.com:a/", "https://[::1/", "https://[zz]/",
    "https://bücher.example/", "https://①②⑦.⓪.⓪.①/", " https://example.com", "https://example.com/" + "a"
    * 9000, "//example.com/a", "",
]  # fmt: skip


def test_strange_urls_are_refused_before_any_lookup(
    monkeypatch: pytest.MonkeyPatch, connections: list[object]
) -> None:
    asked = resolve_to(monkeypatch, [PUBLIC])
    for url in STRANGE:
        with pytest.raises(MediaError) as caught:
            fetch(url)
        assert "secret" not in str(caught.value) and len(str(caught.value)) < 400
        assert asked == [] and connections == [], url


def test_offline_mode_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = resolve_to(monkeypatch, [PUBLIC])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    with pytest.raises(MediaError, match="HF_HUB_OFFLINE"):
        fetch("https://example.com/a.png")
    assert asked == []


@pytest.mark.usefixtures("local_is_public")
def test_a_image_is_fetched_with_the_right_request() -> None:
    image, seen = encoded(Image.new("RGB", (3, 2), (1, 2, 3)), "PNG"), []

    def handle(connection: socket.socket) -> None:
        seen.append(connection.recv(65536).decode())
        connection.sendall(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for start in range(0, len(image), 10):
            part = image[start : start + 10]
            connection.sendall(f"{len(part):x}\r\n".encode() + part + b"\r\n")
        connection.sendall(b"0\r\n\r\n")

    with server(handle) as port:
        image = load_image(f"HTTP://127.0.0.1:{port}/a/b.png?c=d&e=%20#fragment")
    assert np.asarray(image)[0, 0].tolist() == [1, 2, 3]
    lines = seen[0].split("\r\n")
    assert lines[0] == "GET /a/b.png?c=d&e=%20 HTTP/1.1"
    assert f"Host: 127.0.0.1:{port}" in lines and "Accept-Encoding: identity" in lines


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize("handler", [answer(b"x" * 100_000), answer(b"", status="200 OK")])
def test_bodies_up_to_the_limit_are_read(handler: Handler) -> None:
    with server(handler) as port:
        assert len(fetch(f"http://127.0.0.1:{port}", limits=PATIENT)) in (100_000, 0)


def endless(connection: socket.socket) -> None:
    connection.recv(65536)
    connection.sendall(b"HTTP/1.1 200 OK\r\n\r\n")
    while True:
        connection.sendall(b"x" * 65536)


def one_byte_at_a_time(head: bytes) -> Handler:
    def handle(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(head)
        while True:
            connection.sendall(b"x")
            time.sleep(0.05)  # what is tested is a server that sleeps

    return handle


def silent(connection: socket.socket) -> None:
    while connection.recv(65536):
        pass


MISBEHAVIOUR = {
    "redirect": (
        answer(b"", "Location: http://10.0.0.1/", status="302 Found"),
        "(status 302) are not followed",
    ),
    "redirect loop": (answer(b"", "Location: /", status="301 Moved"), "(status 301) are not followed"),
    "not found": (answer(b"no", status="404 Not Found"), "status 404"),
    "partial": (answer(b"no", status="206 Partial Content"), "status 206"),
    "endless body": (endless, "at most 100,000 bytes"),
    "announced large body": (
        answer(b"", length=10**12),
        "at most 100,000 bytes; MediaLimits(max_fetch_bytes",
    ),
    "shorter than announced": (answer(b"abc", length=50), "ended after 3 of 50 bytes"),
    "compressed": (answer(gzip.compress(b"0" * 10**6), "Content-Encoding: gzip"), "without compression"),
    "slow body": (one_byte_at_a_time(b"HTTP/1.1 200 OK\r\n\r\n"), "at most 0.5 seconds"),
    "slow header": (one_byte_at_a_time(b"HTTP/1.1 200 OK\r\nA: "), "at most 0.5 seconds"),
    "silence": (silent, "at most 0.5 seconds"),
    "not HTTP": (lambda c: c.sendall(b"SSH-2.0-OpenSSH\r\n"), "cannot be downloaded ("),
    "closed at once": (lambda c: None, "cannot be downloaded ("),
    "endless header": (
        lambda c: c.sendall(b"HTTP/1.1 200 OK\r\nA: " + b"x" * 10**6),
        "cannot be downloaded (",
    ),
    "bad chunk": (answer(b"zz\r\n", "Transfer-Encoding: chunked"), "cannot be downloaded ("),
}


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize("name", MISBEHAVIOUR)
def test_misbehaving_servers_are_left_in_time(name: str, connections: list[object]) -> None:
    handler, expected = MISBEHAVIOUR[name]
    with server(handler) as port:
        start = time.monotonic()
        with pytest.raises(MediaError) as caught:
            fetch(f"http://127.0.0.1:{port}/a.png", limits=SHORT if "seconds" in expected else PATIENT)
        assert time.monotonic() - start < 10
    assert expected in str(caught.value)
    assert len(connections) == 1  # nothing was followed


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Certificate and key of good.test in one file, signed by itself."""
    if shutil.which("openssl") is None:
        pytest.skip("needs the openssl program")
    path = tmp_path_factory.mktemp("certificate") / "both.pem"
    command = (
        "openssl req -x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -days 2 -subj /CN=good.test"
    )
    command += " -addext subjectAltName=DNS:good.test -out cert.pem -keyout key.pem"
    subprocess.run(command.split(), cwd=path.parent, check=True, capture_output=True)
    path.write_bytes((path.parent / "cert.pem").read_bytes() + (path.parent / "key.pem").read_bytes())
    return path


@pytest.mark.usefixtures("local_is_public")
@pytest.mark.parametrize("case", ["trusted", "other name", "untrusted", "slow"])
def test_tls_checks_the_name_and_the_signature(
    case: str, certificate: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    context.load_cert_chain(certificate)
    resolve_to(monkeypatch, ["127.0.0.1"])
    if case != "untrusted":
        monkeypatch.setenv("SSL_CERT_FILE", str(certificate))
    handler = one_byte_at_a_time(b"HTTP/1.1 200 OK\r\n\r\n") if case == "slow" else answer(b"hello")
    host = "evil.test" if case == "other name" else "good.test"
    with server(handler, tls=context) as port:
        url = f"https://{host}:{port}/"
        if case == "trusted":
            assert fetch(url, limits=PATIENT) == b"hello"
            return
        expected = "at most 0.5 seconds" if case == "slow" else "SSLCertVerificationError"
        with pytest.raises(MediaError, match=expected):
            fetch(url, limits=replace(PATIENT, fetch_timeout_s=0.5) if case == "slow" else PATIENT)


@pytest.mark.usefixtures("local_is_public")
def test_a_tls_handshake_that_stalls_is_left_in_time() -> None:
    with server(silent) as port, pytest.raises(MediaError, match="a connection within at most 0.5 seconds"):
        fetch(f"https://127.0.0.1:{port}/", limits=SHORT)
