"""The transcription page: two equal transcripts beside each other, stops and refusals."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest

from mmspec.core.statistics import DecodingStats
from mmspec.demo.transcription import Transcription, transcripts
from mmspec.errors import InputError, MediaError
from mmspec.pipelines import SpeechOutput, SpeechPipeline
from mmspec.transcripts import Segment
from tests.demo.conftest import PHONE, columns_fit, served, visiting
from tests.media.files import sound, tone
from tests.tiny_models.speech import tiny_speech_model


@pytest.fixture(scope="module")
def demo() -> Transcription:
    pipe = SpeechPipeline(*tiny_speech_model(), "copy")
    one = Transcription(pipe, "tiny")
    one.warm_up()
    return one


@pytest.fixture
def recording(tmp_path: Path) -> dict[str, Any]:
    """An uploaded file, as Gradio sends it."""
    path = tmp_path / "note.wav"
    path.write_bytes(sound(tone(seconds=0.5)))
    return {"path": str(path), "orig_name": "note.wav"}


def test_both_transcripts_are_shown_and_compared(demo, recording):
    first, both = demo.transcribe(recording, True, False, threading.Event())
    assert first.count("<section") == 1 and "plain decoding" in first
    assert both.count("<section") == 2 and "The same text in " in both
    (alone,) = demo.transcribe(recording, False, False, threading.Event())
    assert alone.count("<section") == 1 and 'data-lane="copy"' in alone


def test_a_stop_ends_before_the_next_transcript(demo, recording):
    flag = threading.Event()
    working = demo.transcribe(recording, True, False, flag)
    next(working)
    flag.set()
    assert list(working) == []


@pytest.mark.parametrize(
    ("payload", "error", "said"),
    [
        (None, InputError, "recording must be chosen"),
        ({"path": "pyproject.toml", "orig_name": "mine.wav"}, MediaError, "^mine.wav "),
    ],
)
def test_what_is_no_recording_is_refused_by_its_name(demo, payload, error, said):
    with pytest.raises(error, match=said):
        next(demo.transcribe(payload, True, False, threading.Event()))


def test_times_and_differences_are_shown_and_text_is_escaped():
    stats = DecodingStats("copy", "exact", seconds=1.0)
    plain, fast = (SpeechOutput([text], [[Segment(1.5, 2.0, text)]], stats) for text in ("<b>", "b"))
    html = transcripts({"none": plain, "copy": fast})
    assert "1.5 s  &lt;b&gt;" in html and "Other text" in html


@pytest.mark.slow
def test_a_visitor_transcribes_a_file(browser, demo, recording):
    with served(demo.blocks()) as url, visiting(browser, url, PHONE) as page:
        page.click("#transcribe")
        page.get_by_text("must be chosen or recorded first").wait_for()
        page.locator("#recording input[type=file]").first.set_input_files(recording["path"])
        page.wait_for_selector("#recording audio, #recording canvas, #waveform", state="attached")
        page.click("#transcribe")
        page.get_by_text("The same text in").wait_for()
        assert page.locator("[data-lane]").count() == 2 and columns_fit(page)
