"""`/v1/audio/transcriptions`: transcripts of recordings, in OpenAI's formats."""

from __future__ import annotations

from dataclasses import asdict
from typing import Annotated

from fastapi import APIRouter, Form, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response

from mmspec.open_types import Keywords
from mmspec.pipelines import SpeechOutput
from mmspec.serving.engine import TRANSCRIPTS
from mmspec.serving.errors import RequestError
from mmspec.serving.limits import ServerLimits
from mmspec.serving.models import Models
from mmspec.serving.schemas import TranscriptionRequest
from mmspec.transcripts import TranscriptFormat, write_transcript

__all__ = ["transcription_routes"]

NAMES = {"audio": "file"}  # arguments of the pipeline, with the fields of requests


def transcription_routes(models: Models, limits: ServerLimits) -> APIRouter:
    """Return the route for transcripts."""
    routes = APIRouter()

    @routes.post("/v1/audio/transcriptions")
    async def transcribe(body: Annotated[TranscriptionRequest, Form()], request: Request) -> Response:
        model = models.find(body.model, TRANSCRIPTS)
        recording = await body.file.read()
        ticket = models.submit(request, model, [recording], [settings_of(body)], NAMES)
        await ticket.entered(limits.wait_seconds)
        output: SpeechOutput | None = None
        async for _, event in ticket.updates(limits.run_seconds):
            output = event.output or output
        if output is None:
            raise RequestError(500, "the model gave no transcript")
        return respond(body, output)

    return routes


def settings_of(body: TranscriptionRequest) -> Keywords:
    """Return the arguments of the pipeline for a request."""
    timed = body.response_format in ("srt", "vtt", "verbose_json")
    settings: Keywords = {"return_timestamps": timed}
    for name in ("language", "prompt", "seed"):
        if (value := getattr(body, name)) is not None:
            settings[name] = value
    if body.temperature:
        settings |= {"do_sample": True, "temperature": body.temperature}
    return settings


def respond(body: TranscriptionRequest, output: SpeechOutput) -> Response:
    """Return the response in the format of the request."""
    text, segments = output.text[0].strip(), output.segments[0]
    if body.response_format == "json":
        return JSONResponse({"text": text})
    if body.response_format == "verbose_json":
        parts = [{"id": number, **asdict(segment)} for number, segment in enumerate(segments)]
        about = {"task": "transcribe", "language": body.language or "", "duration": output.seconds[0]}
        return JSONResponse({**about, "text": text, "segments": parts})
    written = write_transcript(text, segments, TranscriptFormat(body.response_format))
    return PlainTextResponse(written + "\n")
