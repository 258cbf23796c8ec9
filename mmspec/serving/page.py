"""`/`: a page that says what runs here, without scripts and external resources."""

from __future__ import annotations

import json
import shlex
from collections.abc import Sequence
from pathlib import Path

from fastapi import APIRouter, Request
from fastapi.responses import HTMLResponse
from jinja2 import Environment, StrictUndefined

from mmspec import __version__
from mmspec.core.statistics import DecodingStats
from mmspec.open_types import Json
from mmspec.serving.engine import IMAGES, TEXT, TRANSCRIPTS, Engine
from mmspec.serving.limits import ServerLimits

__all__ = ["page_routes"]

HEADERS = {"Content-Security-Policy": "default-src 'none'; style-src 'unsafe-inline'; img-src data:"}


def page_routes(engines: Sequence[Engine], limits: ServerLimits, has_key: bool) -> APIRouter:
    """Return the route of the page.

    Args:
        engines: engines of the server.
        limits: limits on requests.
        has_key: whether clients have to send an API key.
    """
    source = Path(__file__).with_name("page.html").read_text(encoding="utf-8")
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(source)
    routes = APIRouter()

    @routes.get("/", include_in_schema=False)
    async def page(request: Request) -> HTMLResponse:
        text = template.render(
            version=__version__,
            models=[{"name": engine.name, "facts": facts_of(engine)} for engine in engines],
            limits=limits_of(limits, has_key),
            example=example_of(engines, str(request.base_url), has_key),
        )
        return HTMLResponse(text, headers=HEADERS)

    return routes


def facts_of(engine: Engine) -> dict[str, str]:
    """Return what the page says about a model."""
    accelerator, processor = engine.pipeline.accelerator, engine.pipeline.processor
    sees = getattr(processor, "image_processor", None) is not None
    tasks = {
        TEXT: f"text from text{' and images' if sees else ''}",
        IMAGES: "images from text",
        TRANSCRIPTS: "text from audio",
    }
    return {
        "Task": tasks[engine.makes],
        "Accelerator": accelerator.name,
        "Promise": DecodingStats("", accelerator.exactness, accelerator.keeps).promise,
        "Rows": f"{engine.running} of {engine.rows} running, {len(engine.waiting)} waiting",
        "State": "running" if engine.is_alive else "stopped",
    }


def limits_of(limits: ServerLimits, has_key: bool) -> dict[str, str]:
    """Return what the page says about limits, by their name for people."""
    return {
        "Tokens": f"{limits.max_tokens:,} per answer",
        "Answers": f"{limits.max_choices} per request",
        "Images": f"{limits.max_images} per request",
        "Body": f"{limits.max_body_bytes:,} bytes",
        "Queue": f"{limits.max_waiting:,} rows per model",
        "Time": f"{limits.run_seconds:g} seconds of decoding",
        "API key": "required for the routes under /v1" if has_key else "none",
    }


def example_of(engines: Sequence[Engine], url: str, has_key: bool) -> str:
    """Return a shell command that sends a request to the first model."""
    if not engines:
        return ""
    engine = engines[0]
    body: Json = {"model": engine.name, "messages": [{"role": "user", "content": "hello"}], "max_tokens": 32}
    if engine.makes == TRANSCRIPTS:
        parts = ["curl " + shlex.quote(url + "v1/audio/transcriptions"), "-F file=@speech.mp3"]
        return " \\\n  ".join([*parts, *["-H 'Authorization: Bearer KEY'"] * has_key])
    if engine.makes == IMAGES:
        body = {"model": engine.name, "prompt": "a red ring left of a small blue cross", "seed": 1}
    route = "v1/images/generations" if engine.makes == IMAGES else "v1/chat/completions"
    headers = ["Content-Type: application/json", *["Authorization: Bearer KEY"] * has_key]
    sent = json.dumps(body, indent=2, ensure_ascii=False)
    parts = ["curl " + shlex.quote(url + route), *("-H " + shlex.quote(each) for each in headers)]
    return " \\\n  ".join([*parts, "-d " + shlex.quote(sent)])
