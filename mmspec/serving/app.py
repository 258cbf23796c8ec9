"""ASGI application of the server: routes, error handlers, health, metrics and CORS."""

from __future__ import annotations

import asyncio
import re
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from fastapi_offline import FastAPIOffline
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from mmspec import __version__
from mmspec.errors import InputError, MMSpecError
from mmspec.serving.chat import chat_routes
from mmspec.serving.completions import completion_routes
from mmspec.serving.engine import TEXT, Engine
from mmspec.serving.errors import RequestError, error_response, field_error
from mmspec.serving.guard import Guard
from mmspec.serving.images import image_routes
from mmspec.serving.limits import ServerLimits
from mmspec.serving.metrics import Metrics
from mmspec.serving.models import Models, model_routes
from mmspec.serving.openapi import complete_document
from mmspec.serving.page import page_routes
from mmspec.serving.tool_calls import AUTO, answer_format
from mmspec.serving.transcriptions import transcription_routes

__all__ = ["create_app", "read_origin"]

ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/?#@*]+")
USUAL_PORTS = {"http": ":80", "https": ":443"}


def create_app(
    engines: Sequence[Engine],
    metrics: Metrics,
    limits: ServerLimits,
    api_key: str | None = None,
    origins: Sequence[str] = (),
    tool_parser: str = AUTO,
    reasoning_parser: str = AUTO,
) -> ASGIApp:
    """Create the ASGI application of the server; it starts and stops the engines.

    Args:
        engines: engines, not started yet.
        metrics: metrics, the same as those of the engines.
        limits: limits on requests.
        api_key: bearer token that clients have to send; None disables authentication.
        origins: allowed origins of web pages (CORS), as returned by `read_origin`.
        tool_parser, reasoning_parser: names of parsers for all text models; "auto" chooses by the model.
    """

    @asynccontextmanager
    async def run_engines(_app: FastAPI) -> AsyncIterator[None]:
        for engine in engines:
            engine.start()
        for engine in engines:
            await asyncio.to_thread(engine.is_ready.wait)
        try:
            yield
        finally:
            for engine in engines:
                engine.close()

    app = FastAPIOffline(  # its /docs load nothing from other servers
        title="mmspec",
        version=__version__,
        lifespan=run_engines,
        redoc_url=None,
        swagger_ui_parameters={"validatorUrl": None},
    )
    models = Models(engines)
    formats = {
        engine.name: answer_format(engine.pipeline, tool_parser, reasoning_parser)
        for engine in engines
        if engine.makes == TEXT
    }
    app.include_router(page_routes(engines, limits, has_key=api_key is not None))
    app.include_router(chat_routes(models, limits, formats))
    for routes in (completion_routes, image_routes, transcription_routes):
        app.include_router(routes(models, limits))
    app.include_router(model_routes(models))

    @app.get("/health")
    async def health() -> JSONResponse:
        dead = [engine.name for engine in engines if not engine.is_alive]
        if dead:
            raise RequestError(503, f"the worker of {', '.join(dead)} has failed; restart the server")
        return JSONResponse({"status": "ok", "models": [engine.name for engine in engines]})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    complete_document(app, has_key=api_key is not None)

    async def answer_error(request: Request, error: Exception) -> JSONResponse:
        if isinstance(error, RequestValidationError):
            error = field_error(error.errors(), error.body)
        elif isinstance(error, HTTPException) and error.status_code == 404:
            text = f"this server has no route {request.url.path[:80]!r}; it has {', '.join(routes_of(app))}"
            error = RequestError(404, text, code="unknown_route")
        elif isinstance(error, HTTPException):
            error = RequestError(error.status_code, str(error.detail))
        return error_response(error)

    for kind in (MMSpecError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer_error)
    guarded = Guard(app, limits, api_key)
    if not origins:
        return guarded
    return CORSMiddleware(  # outside the guard: browsers send preflight requests without the API key
        guarded,
        allow_origins=origins,
        allow_methods=["GET", "POST"],
        allow_headers=["*"],
        expose_headers=["Retry-After", "X-Request-ID"],
    )


def routes_of(app: FastAPI) -> list[str]:
    """Return the routes of models and their methods, such as "POST /v1/completions"."""
    own = {path: methods for path, methods in app.openapi()["paths"].items() if path.startswith("/v1")}
    return [f"{method.upper()} {path}" for path, methods in own.items() for method in methods]


def read_origin(origin: str) -> str:
    """Normalise an origin as browsers do: in lower case, without the default port.

    Raises:
        InputError: the origin is neither * nor a scheme and a host.
    """
    written = origin.lower()
    if written == "*":
        return written
    if not ORIGIN.fullmatch(written):
        rule = "must be scheme, host and port of a page, such as http://localhost:3000, without a path; or *"
        raise InputError("--allow-origin", origin, rule)
    scheme = written.partition(":")[0]
    return written.removesuffix(USUAL_PORTS.get(scheme, ""))
