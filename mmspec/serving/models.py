"""The models of a server by name, and `/v1/models`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence

from fastapi import APIRouter, Request

from mmspec.open_types import Json, Keywords
from mmspec.serving.engine import Engine, Ticket
from mmspec.serving.errors import RequestError
from mmspec.serving.guard import END

__all__ = ["Models", "model_routes"]


class Models:
    """The engines of a server; the first of each kind answers requests that name no model."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines

    def find(self, name: str | None, *, draws: bool) -> Engine:
        """The engine that a request means.

        Raises:
            RequestError: there is none (404), or it does the other thing (400).
        """
        able = [engine for engine in self.engines if engine.draws == draws]
        what = "draws images" if draws else "answers"
        if name is None:
            if not able:
                raise RequestError(404, f"no model of this server {what}", "model", "model_not_found")
            return able[0]
        for engine in self.engines:
            if engine.name == name and engine not in able:
                raise RequestError(400, f"the model {name!r} is not one that {what}", "model")
            if engine.name == name:
                return engine
        known = ", ".join(engine.name for engine in self.engines)
        text = f"there is no model {name[:80]!r} here; there is {known}"
        raise RequestError(404, text, "model", "model_not_found")

    def submit(
        self,
        request: Request,
        engine: Engine,
        prompt: object,
        settings: Sequence[Keywords],
        names: Mapping[str, str] | None = None,
    ) -> Ticket:
        """Let a request wait for places in the batch, from which it is taken when its client goes."""
        ticket = engine.submit(prompt, settings, names)
        request.scope[END].callback(engine.cancel, ticket)
        return ticket


def model_routes(models: Models) -> APIRouter:
    """The routes that list models."""
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
        raise RequestError(404, f"there is no model {name[:80]!r} here", "model", "model_not_found")

    return routes
