"""The server's application: routes, errors, health and metrics."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST, generate_latest
from starlette.exceptions import HTTPException

from mmspec import __version__
from mmspec.errors import MMSpecError
from mmspec.serving.chat import chat_routes
from mmspec.serving.engine import Engine
from mmspec.serving.errors import RequestError, error_response
from mmspec.serving.guard import Guard
from mmspec.serving.images import image_routes
from mmspec.serving.limits import ServerLimits
from mmspec.serving.metrics import Metrics
from mmspec.serving.models import Models, model_routes

__all__ = ["create_app"]


def create_app(
    engines: Sequence[Engine], metrics: Metrics, limits: ServerLimits, api_key: str | None = None
) -> Guard:
    """Make the application; its engines start and end with it.

    Args:
        engines: not started yet.
        metrics: that the engines count in.
        limits: of every request.
        api_key: bearer token of clients; None asks for nothing.

    Returns:
        An ASGI application.
    """

    @asynccontextmanager
    async def run_engines(_app: FastAPI) -> AsyncIterator[None]:
        for engine in engines:
            engine.start()
        try:
            yield
        finally:
            for engine in engines:
                engine.close()

    app = FastAPI(title="mmspec", version=__version__, lifespan=run_engines)
    models = Models(engines)
    for routes in (chat_routes(models, limits), image_routes(models, limits), model_routes(models)):
        app.include_router(routes)

    @app.get("/health")
    async def health() -> JSONResponse:
        dead = [engine.name for engine in engines if not engine.is_alive]
        if dead:
            raise RequestError(503, f"the worker of {', '.join(dead)} has ended; restart the server")
        return JSONResponse({"status": "ok", "models": [engine.name for engine in engines]})

    @app.get("/metrics")
    async def show_metrics() -> Response:
        return Response(generate_latest(metrics.registry), media_type=CONTENT_TYPE_LATEST)

    @app.exception_handler(MMSpecError)
    async def answer_error(_request: Request, error: MMSpecError) -> JSONResponse:
        return error_response(error)

    @app.exception_handler(RequestValidationError)
    async def answer_invalid(_request: Request, error: RequestValidationError) -> JSONResponse:
        return error_response(invalid(error.errors()))

    @app.exception_handler(HTTPException)
    async def answer_http(_request: Request, error: HTTPException) -> JSONResponse:
        return error_response(RequestError(error.status_code, str(error.detail)))

    @app.exception_handler(Exception)
    async def answer_failure(_request: Request, error: Exception) -> JSONResponse:
        return error_response(error)

    return Guard(app, limits, api_key)


def invalid(problems: Sequence[Any]) -> RequestError:
    """The error for a body that does not have the form of a request: the first thing that is wrong."""
    first = problems[0]
    places = [str(place) for place in first["loc"] if place != "body"]
    if first["type"] == "json_invalid":
        return RequestError(400, "the body is not valid JSON", code="invalid_json")
    where = ".".join(places)
    return RequestError(400, f"{where or 'body'}: {first['msg']}", where or None)
