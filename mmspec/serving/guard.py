"""ASGI middleware around every request: id, API key, body size, timeouts, and cancellation on disconnect."""

from __future__ import annotations

import asyncio
import hmac
import logging
import re
import uuid
from contextlib import ExitStack

from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from mmspec.serving.errors import RequestError, error_response
from mmspec.serving.limits import ServerLimits
from mmspec.serving.request_log import RECORD, RequestRecord, fields_of, request_id

__all__ = ["END", "Guard"]

logger = logging.getLogger(__name__)

END = "mmspec.end"  # key of a scope: an ExitStack that is closed when the request ends in any way
REQUEST_ID = re.compile(r"[\w.-]{1,64}", re.ASCII)


class Guard:
    """ASGI middleware in which requests begin and end.

    It reads the whole body, within its limit, before it calls the application. Disconnecting cancels the
    application. Each request is one line of the log, which never has a prompt.
    """

    def __init__(self, app: ASGIApp, limits: ServerLimits, api_key: str | None = None) -> None:
        self._app, self._limits = app, limits
        self._key = None if api_key is None else api_key.encode()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        named = headers.get("x-request-id", "")
        own = named if REQUEST_ID.fullmatch(named) else uuid.uuid4().hex
        record = scope[RECORD] = RequestRecord(own, scope["method"], scope["path"])
        sender = Sender(send, own, self._limits)
        named_in_log = request_id.set(own)
        try:
            self._check_key(scope["path"], headers)
            body = await self._read(headers, receive)
            record.size = len(body)
            with ExitStack() as scope[END]:
                await run_until_gone(self._app, scope, body, receive, sender)
        except RequestError as error:
            await error_response(error)(scope, receive, sender)
        finally:
            if sender.is_complete:
                record.status = sender.status
            logger.info("request", extra=fields_of(**record.fields()))
            request_id.reset(named_in_log)

    def _check_key(self, path: str, headers: Headers) -> None:
        if self._key is None or not path.startswith("/v1"):
            return
        scheme, _, given = headers.get("authorization", "").partition(" ")
        if scheme.lower() != "bearer" or not hmac.compare_digest(given.strip().encode("latin-1"), self._key):
            text = "the API key is missing or wrong; send it in the header Authorization: Bearer KEY"
            raise RequestError(401, text, code="invalid_api_key")

    async def _read(self, headers: Headers, receive: Receive) -> bytes:
        most, body = self._limits.max_body_bytes, bytearray()
        promised = headers.get("content-length", "0")
        if promised.isdigit() and int(promised) > most:
            raise too_large(most)
        try:
            async with asyncio.timeout(self._limits.idle_seconds):
                while True:
                    message = await receive()
                    body += message.get("body", b"")
                    if len(body) > most:
                        raise too_large(most)
                    if not message.get("more_body", False):
                        return bytes(body)
        except TimeoutError:
            text = f"the body was not received within idle_seconds={self._limits.idle_seconds:g}"
            raise RequestError(408, text) from None


class Sender:
    """Sends a response with the request id, with a timeout for clients that stop reading."""

    def __init__(self, send: Send, request_id: str, limits: ServerLimits) -> None:
        self._send, self._seconds, self.request_id = send, limits.idle_seconds, request_id
        self.status, self.is_complete = 0, False

    async def __call__(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self.status = message["status"]
            MutableHeaders(scope=message)["X-Request-ID"] = self.request_id
        async with asyncio.timeout(self._seconds):
            await self._send(message)
        if message["type"] == "http.response.body" and not message.get("more_body", False):
            self.is_complete = True


async def run_until_gone(app: ASGIApp, scope: Scope, body: bytes, receive: Receive, sender: Sender) -> None:
    """Run an application on a body that was read; cancel it when the client disconnects."""
    messages = [{"type": "http.request", "body": body, "more_body": False}]
    gone = asyncio.Event()

    async def replay() -> Message:
        if messages:
            return messages.pop()
        await gone.wait()
        return {"type": "http.disconnect"}

    async def watch() -> None:
        while (await receive())["type"] != "http.disconnect":
            pass

    work, watcher = asyncio.ensure_future(app(scope, replay, sender)), asyncio.ensure_future(watch())
    try:
        await asyncio.wait({work, watcher}, return_when=asyncio.FIRST_COMPLETED)
        if sender.is_complete:  # the end of a response is received as a disconnect too
            gone.set()
            await work
        elif work.done():
            await work
    finally:
        for task in (work, watcher):
            task.cancel()
        await asyncio.gather(work, watcher, return_exceptions=True)


def too_large(most: int) -> RequestError:
    """Make the error for a body that exceeds the limit."""
    return RequestError(413, f"the body is larger than max_body_bytes={most:,}", code="request_too_large")
