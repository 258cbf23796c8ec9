"""A local server with programmable faults, and a block of all connections that are not local."""

from __future__ import annotations

import contextlib
import socket
import ssl
import threading
from collections.abc import Callable, Iterator

Handler = Callable[[socket.socket], None]


class OutsideWorldError(AssertionError):
    """A test tried to connect to something that is not on this machine."""


@contextlib.contextmanager
def only_local_connections() -> Iterator[list[object]]:
    """Let sockets connect to loopback addresses only; yield the list of the addresses that were tried."""
    connect, tried = socket.socket.connect, []

    def guarded(self: socket.socket, address: object) -> None:
        tried.append(address)
        host = address[0] if isinstance(address, tuple) else "unix"
        if host not in ("127.0.0.1", "::1", "unix"):
            raise OutsideWorldError(f"connection to {address}")
        connect(self, address)  # type: ignore[arg-type]

    socket.socket.connect = guarded  # type: ignore[method-assign, assignment]
    try:
        yield tried
    finally:
        socket.socket.connect = connect  # type: ignore[method-assign]


@contextlib.contextmanager
def server(handler: Handler, tls: ssl.SSLContext | None = None) -> Iterator[int]:
    """Run `handler` for each connection to a port of 127.0.0.1; yield the port."""
    listener = socket.create_server(("127.0.0.1", 0))
    open_connections: list[socket.socket] = []

    def serve() -> None:
        while True:
            try:
                connection, _ = listener.accept()
            except OSError:
                return
            open_connections.append(connection)
            with contextlib.suppress(OSError), contextlib.closing(connection):
                encrypted = tls.wrap_socket(connection, server_side=True) if tls else connection
                with encrypted:
                    handler(encrypted)

    thread = threading.Thread(target=serve, daemon=True)
    thread.start()
    try:
        yield listener.getsockname()[1]
    finally:
        for connection in open_connections:
            connection.close()
        listener.shutdown(socket.SHUT_RDWR)
        listener.close()
        thread.join(timeout=5)


def answer(body: bytes, *headers: str, status: str = "200 OK", length: int | None = None) -> Handler:
    """A handler that sends one answer and closes."""
    declared = f"Content-Length: {len(body) if length is None else length}"
    head = "\r\n".join([f"HTTP/1.1 {status}", declared, *headers]) + "\r\n\r\n"

    def handle(connection: socket.socket) -> None:
        connection.recv(65536)
        connection.sendall(head.encode() + body)

    return handle
