"""`mmspec transcribe`: formats, comparison with plain decoding, word error rates, and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from mmspec import SpeechPipeline
from mmspec.cli.application import app
from mmspec.transcripts import Segment, TranscriptFormat, write_transcript
from tests.media.files import sound, tone
from tests.tiny_models.speech import tiny_speech_model


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    base = tmp_path_factory.mktemp("speech")
    SpeechPipeline(*tiny_speech_model()).save_pretrained(base / "model")
    for name, hertz in (("low", 200), ("high", 700)):
        (base / f"{name}.wav").write_bytes(sound(tone(hertz=hertz)))
    return base


def transcribe(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["transcribe", *map(str, arguments)])
    return result.exit_code, result.stdout or str(result.exception or "")


def test_records_are_those_of_the_pipeline(folder: Path) -> None:
    pipe = SpeechPipeline.from_pretrained(folder / "model")
    paths = [folder / "low.wav", folder / "high.wav"]
    code, text = transcribe(folder / "model", *paths, "--compare", "--json")
    records = json.loads(text)
    assert code == 0 and [record["identical"] for record in records] == [True, True]
    assert [record["text"] for record in records] == [one.strip() for one in pipe(paths).text]
    words = folder / "words.txt"
    words.write_text(records[0]["text"].upper() + ".")
    code, text = transcribe(folder / "model", paths[0], "--reference", words, "--json")
    assert json.loads(text)[0]["word_error_rate"] == 0.0


def test_files_in_a_folder(folder: Path) -> None:
    code, text = transcribe(folder / "model", folder / "low.wav", "--out", folder / "out", "--format", "json")
    written = json.loads((folder / "out" / "low.json").read_text())
    assert (code, text) == (0, "") and written["segments"] == []


def test_formats_with_times() -> None:
    segments = [Segment(0.0, 2.5, " Hello there."), Segment(3661.042, None, " Bye.")]
    srt = write_transcript("", segments, TranscriptFormat.SRT)
    assert srt.split("\n\n") == [
        "1\n00:00:00,000 --> 00:00:02,500\nHello there.",
        "2\n01:01:01,042 --> 01:01:01,042\nBye.",
    ]
    vtt = write_transcript("", segments, TranscriptFormat.VTT)
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello there.\n\n01:01:01.042")
    assert write_transcript(" Hello. ", [], TranscriptFormat.TEXT) == "Hello."


def test_a_reference_needs_one_recording(folder: Path) -> None:
    words = folder / "reference.txt"
    words.write_text("a word")
    code, text = transcribe(folder / "model", "a.wav", "b.wav", "--reference", words)
    assert code != 0 and "needs exactly one recording" in text
