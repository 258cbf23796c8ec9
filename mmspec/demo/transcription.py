"""Page that transcribes a recording, next to plain decoding."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from html import escape
from typing import Any, cast

import gradio as gr
import numpy as np

from mmspec.demo.buttons import Stops, connect
from mmspec.demo.talk import comparison
from mmspec.demo.theme import figures, heading, page, tags, title
from mmspec.demo.uploads import UPLOAD_LIMITS, read_upload
from mmspec.errors import InputError
from mmspec.pipelines import SpeechOutput, SpeechPipeline

__all__ = ["Transcription"]

EMPTY = '<p class="mm-empty">Choose a recording, or record one. Its transcript appears here.</p>'
SAID = "A drafter proposes several tokens, and the speech model verifies them in one forward pass."


class Transcription:
    """The page and its events."""

    def __init__(self, pipe: SpeechPipeline, model: str) -> None:
        self.pipe, self.model = pipe, model
        self.plain = SpeechPipeline(pipe.model, pipe.processor, "none")
        for each in (self.pipe, self.plain):
            each.media_limits = UPLOAD_LIMITS
        self.takes_times = pipe.model.config.model_type == "whisper"
        self.stops = Stops()

    def warm_up(self) -> None:
        """Transcribe a second of silence with both pipelines, since the first call is slower."""
        rate = self.pipe.processor.feature_extractor.sampling_rate
        for pipe in (self.pipe, self.plain):
            pipe((np.zeros(rate, np.float32), rate), max_new_tokens=8)

    def transcribe(
        self, recording: Mapping[str, object] | None, racing: bool, timed: bool, flag: threading.Event
    ) -> Iterator[str]:
        """Transcribe a recording, yielding the transcripts so far as HTML.

        With `racing`, plain decoding runs first. A set flag stops before the next transcript.

        Raises:
            InputError: there is no recording.
            MediaError: the recording is unreadable or over a limit.
        """
        upload = read_upload("audio", recording)
        if upload is None:
            raise InputError("recording", None, "must be chosen or recorded first")
        outputs: dict[str, SpeechOutput] = {}
        for pipe in [self.plain, self.pipe] if racing else [self.pipe]:
            if flag.is_set():
                return
            output: Any = pipe(upload.path, return_timestamps=timed)
            outputs[pipe.accelerator.name] = output
            yield transcripts(outputs)

    def blocks(self) -> gr.Blocks:
        """Build the page."""
        with page("mmspec: transcripts") as blocks:
            gr.HTML(heading("Transcribe a recording", SAID, self.model))
            with gr.Row():
                with gr.Column(scale=2, min_width=320):
                    recording = gr.Audio(
                        type="filepath",
                        sources=["upload", "microphone"],
                        label="Recording",
                        elem_id="recording",
                    )
                    with gr.Row():
                        start = gr.Button("Transcribe", variant="primary", elem_id="transcribe")
                        stop = gr.Button("Stop", variant="stop", visible=False, elem_id="stop")
                    racing = gr.Checkbox(True, label="Compare with plain decoding", elem_id="race")
                    timed = gr.Checkbox(
                        False, label="Times of segments", visible=self.takes_times, elem_id="timed"
                    )
                with gr.Column(scale=3, min_width=320):
                    shown = gr.HTML(EMPTY, elem_id="transcripts")
            inputs = [recording, racing, timed]
            # no preprocessing by Gradio: a recording is checked before anything opens it
            connect(
                self.stops, [start.click], self.transcribe, inputs, [shown], (start, stop), preprocess=False
            )
            blocks.unload(self.stops.leave)
        return cast(gr.Blocks, blocks)


def transcripts(outputs: Mapping[str, SpeechOutput]) -> str:
    """Transcripts of a recording by accelerator, and their comparison, as HTML."""
    cards = "".join(card(name, output) for name, output in outputs.items())
    compared = ""
    if len(outputs) == 2:
        plain, fast = outputs.values()
        is_same = (plain.text, plain.segments) == (fast.text, fast.segments)
        compared = comparison("text", is_same, plain.stats, fast.stats)
    return f'<div class="mm-talk" role="log"><div class="mm-cards">{cards}</div>{compared}</div>'


def card(name: str, output: SpeechOutput) -> str:
    """One transcript as HTML, with the times of its segments if they are known."""
    stats = output.stats
    segments = output.segments[0]
    lines = [f"{each.start:6.1f} s  {each.text.strip()}" for each in segments] or [output.text[0].strip()]
    shown = {
        "tokens per forward pass": f"{stats.acceptance_length:.2f}",
        "forward passes": str(stats.target_forwards),
        "seconds": f"{stats.seconds:.2f}",
    }
    words = [] if name == "none" else [stats.exactness]
    text = escape("\n".join(lines))
    return (
        f'<section class="mm-card" data-lane="{escape(name)}"><header><b>{escape(title(name))}</b>'
        f'{tags(words)}</header><p class="mm-text">{text}</p>{figures(shown)}</section>'
    )
