"""Models of the server by name, and the routes `/v1/models`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Request

from mmspec.open_types import Json, Keywords
from mmspec.serving.engine import Engine, Ticket
from mmspec.serving.errors import RequestError
from mmspec.serving.guard import END
from mmspec.serving.request_log import RECORD, RequestRecord

__all__ = ["Models", "model_routes"]


class Models:
    """Engines of the server; the first one of each kind serves requests without a model name."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines

    def find(self, name: str | None, *, draws: bool) -> Engine:
        """Return the engine for a request.

        Raises:
            RequestError: there is no such model (404), or it generates the other modality (400).
        """
        able = [engine for engine in self.engines if engine.draws == draws]
        what = "generates images" if draws else "generates text"
        if name is None:
            if not able:
                raise RequestError(404, f"no model of this server {what}", "model", "model_not_found")
            return able[0]
        for engine in self.engines:
            if engine.name == name and engine not in able:
                raise RequestError(400, f"model must be one that {what}; got {name!r}", "model")
            if engine.name == name:
                return engine
        known = ", ".join(engine.name for engine in self.engines)
        text = f"model must be one of {known}; got {name[:80]!r}"
        raise RequestError(404, text, "model", "model_not_found")

    def submit(
        self,
        request: Request,
        engine: Engine,
        prompts: Sequence[object],
        settings: Sequence[Keywords],
        names: Mapping[str, str] | None = None,
    ) -> Ticket:
        """Queue a request; disconnecting cancels it."""
        ticket = engine.submit(prompts, settings, names)
        request.scope[END].callback(engine.cancel, ticket)
        record: RequestRecord = request.scope[RECORD]
        record.model, record.ticket = engine.name, ticket
        return ticket


def model_routes(models: Models) -> APIRouter:
    """Return the routes that list models."""
    routes, created = APIRouter(), int(time.time())

    def shown(engine: Engine) -> Json:
        return {"id": engine.name, "object": "model", "created": created, "owned_by": "mmspec"}

    @routes.get("/v1/models")
    async def list_models() -> Json:
        return {"object": "list", "data": [shown(engine) for engine in models.engines]}

    @routes.get("/v1/models/{name:path}")
    async def find_model(name: str) -> Json:
        for engine in models.engines:
            if engine.name == name:
                return shown(engine)
        raise RequestError(404, f"there is no model {name[:80]!r}", "model", "model_not_found")

    return routes
