"""Models of the server by name, and the routes `/v1/models`."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from fastapi import APIRouter, Request

from mmspec.open_types import Json, Keywords
from mmspec.serving.engine import Engine, Ticket
from mmspec.serving.errors import RequestError
from mmspec.serving.guard import END
from mmspec.serving.request_log import RECORD, RequestRecord

__all__ = ["Models", "Served", "model_routes"]


@dataclass(frozen=True)
class Served:
    """A model as requests name it: an engine, with one of its adapters or none."""

    engine: Engine
    adapter: str | None = None

    @property
    def name(self) -> str:
        """The name in requests."""
        return self.adapter or self.engine.name


class Models:
    """Engines of the server; the first one of each kind serves requests without a model name."""

    def __init__(self, engines: Sequence[Engine]) -> None:
        self.engines = engines
        served = [Served(engine, adapter) for engine in engines for adapter in (None, *engine.adapters)]
        self.served = {one.name: one for one in served}

    def find(self, name: str | None, makes: str) -> Served:
        """Return the model of a request.

        Args:
            name: of the model; None for the first one.
            makes: what the request asks for; see `Engine.makes`.

        Raises:
            RequestError: there is no such model (404), or it makes something else (400).
        """
        what = f"makes {makes}"
        if name is None:
            able = next((one for one in self.served.values() if one.engine.makes == makes), None)
            if able is None:
                raise RequestError(404, f"no model of this server {what}", "model", "model_not_found")
            return able
        found = self.served.get(name)
        if found is None:
            text = f"model must be one of {', '.join(self.served)}; got {name[:80]!r}"
            raise RequestError(404, text, "model", "model_not_found")
        if found.engine.makes != makes:
            raise RequestError(400, f"model must be one that {what}; got {name!r}", "model")
        return found

    def submit(
        self,
        request: Request,
        model: Served,
        prompts: Sequence[object],
        settings: Sequence[Keywords],
        names: Mapping[str, str] | None = None,
    ) -> Ticket:
        """Queue a request; disconnecting cancels it."""
        if model.engine.adapters:
            settings = [{**one, "adapter": model.adapter} for one in settings]
        ticket = model.engine.submit(prompts, settings, names)
        request.scope[END].callback(model.engine.cancel, ticket)
        record: RequestRecord = request.scope[RECORD]
        record.model, record.ticket = model.name, ticket
        return ticket


def model_routes(models: Models) -> APIRouter:
    """Return the routes that list models."""
    routes, created = APIRouter(), int(time.time())

    def shown(model: Served) -> Json:
        about = {"id": model.name, "object": "model", "created": created, "owned_by": "mmspec"}
        return about if model.adapter is None else {**about, "parent": model.engine.name}

    @routes.get("/v1/models")
    async def list_models() -> Json:
        return {"object": "list", "data": [shown(model) for model in models.served.values()]}

    @routes.get("/v1/models/{name:path}")
    async def find_model(name: str) -> Json:
        if name not in models.served:
            raise RequestError(404, f"there is no model {name[:80]!r}", "model", "model_not_found")
        return shown(models.served[name])

    return routes
