"""Segments of transcripts, and their formats: text, JSON, SubRip (srt) and WebVTT (vtt)."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from enum import StrEnum

__all__ = ["TIMED", "Segment", "TranscriptFormat", "write_transcript"]


@dataclass(frozen=True)
class Segment:
    """A part of a transcript with its times in seconds."""

    start: float
    end: float
    text: str


class TranscriptFormat(StrEnum):
    """Formats of `mmspec transcribe` and of the server."""

    TEXT = "text"
    JSON = "json"
    SRT = "srt"
    VTT = "vtt"


TIMED = (TranscriptFormat.SRT, TranscriptFormat.VTT)  # formats that need segments


def write_transcript(text: str, segments: Sequence[Segment], form: TranscriptFormat) -> str:
    """Return a transcript in a format, without a final line break.

    Args:
        text: the whole transcript.
        segments: its segments in order of time; needed by the formats in `TIMED`.
        form: the format.
    """
    if form is TranscriptFormat.TEXT:
        return text.strip()
    if form is TranscriptFormat.JSON:
        return json.dumps({"text": text.strip(), "segments": list(map(asdict, segments))}, ensure_ascii=False)
    is_srt = form is TranscriptFormat.SRT
    point = "," if is_srt else "."
    blocks = [] if is_srt else ["WEBVTT"]
    for number, segment in enumerate(segments, 1):
        times = f"{clock(segment.start, point)} --> {clock(segment.end, point)}"
        blocks.append("\n".join([*[str(number)] * is_srt, times, segment.text.strip()]))
    return "\n\n".join(blocks)


def clock(seconds: float, point: str) -> str:
    """Return a time as HH:MM:SS, a decimal point, and milliseconds."""
    total = round(seconds * 1000)
    minutes, milliseconds = divmod(total, 60_000)
    return f"{minutes // 60:02}:{minutes % 60:02}:{milliseconds // 1000:02}{point}{milliseconds % 1000:03}"
