"""`/v1/images/generations`: image generation, returned as base64 PNG files."""

from __future__ import annotations

import time
from typing import Any

from anyio import to_thread
from fastapi import APIRouter, Request

from mmspec.media.images import encode_image
from mmspec.open_types import Json
from mmspec.serving.chat_settings import same_fields, seeded
from mmspec.serving.engine import IMAGES, Engine
from mmspec.serving.errors import RequestError
from mmspec.serving.limits import ServerLimits, check_at_most
from mmspec.serving.models import Models
from mmspec.serving.schemas import ImageRequest

__all__ = ["image_routes"]


def image_routes(models: Models, limits: ServerLimits) -> APIRouter:
    """Return the route for image generation."""
    routes = APIRouter()

    @routes.post("/v1/images/generations")
    async def generate(body: ImageRequest, request: Request) -> Json:
        model = models.find(body.model, IMAGES)
        check_at_most("n", body.n, "max_choices", limits.max_choices)
        check_size(body.size, model.engine)
        settings = seeded(same_fields(body), body.seed, body.n)
        ticket = models.submit(request, model, [body.prompt] * body.n, settings)
        await ticket.entered(limits.wait_seconds)
        outputs: dict[int, Any] = {}
        async for index, event in ticket.updates(limits.run_seconds):
            if event.finish_reason is not None:
                outputs[index] = event.output
        images = [outputs[index].images[0] for index in range(body.n)]
        data = [{"b64_json": await to_thread.run_sync(encode_image, image)} for image in images]
        tokens = sum(sum(output.stats.new_tokens) for output in outputs.values())
        return {
            "created": int(time.time()),
            "data": data,
            "output_format": "png",
            "size": "{}x{}".format(*images[0].size),
            "usage": {"input_tokens": 0, "output_tokens": tokens, "total_tokens": tokens},
        }

    return routes


def check_size(size: str | None, engine: Engine) -> None:
    """Raise RequestError unless the size is that of the model, since images of a batch share it."""
    grid, stride = engine.pipeline.target.grid, engine.pipeline.stride
    own = f"{grid.columns * stride}x{grid.rows * stride}"
    if size not in (None, "auto", own):
        raise RequestError(400, f"size must be {own}, the image size of this model; got {size!r}", "size")
