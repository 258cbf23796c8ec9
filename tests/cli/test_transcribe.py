"""`mmspec transcribe` and `mmspec bench` of speech models: formats, word error rates, and refusals."""

from __future__ import annotations

import json
import sys
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


def run(*arguments: object) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(map(str, arguments)))
    return result.exit_code, result.stdout or str(result.exception or "")


def transcribe(*arguments: object) -> tuple[int, str]:
    return run("transcribe", *arguments)


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
    segments = [Segment(0.0, 2.5, " Hello there."), Segment(3661.042, 3662.0, " Bye.")]
    srt = write_transcript("", segments, TranscriptFormat.SRT)
    assert srt.split("\n\n") == [
        "1\n00:00:00,000 --> 00:00:02,500\nHello there.",
        "2\n01:01:01,042 --> 01:01:02,000\nBye.",
    ]
    vtt = write_transcript("", segments, TranscriptFormat.VTT)
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> 00:00:02.500\nHello there.\n\n01:01:01.042")
    assert write_transcript(" Hello. ", [], TranscriptFormat.TEXT) == "Hello."


def test_a_recording_that_cannot_be_decoded_is_skipped(folder: Path) -> None:
    data = sound(tone())
    empty = folder / "no.wav"
    empty.write_bytes(data[: data.index(b"data") + 8])  # a header without samples
    code, text = transcribe(folder / "model", empty)
    assert code != 0 and f"{empty} must not be empty" in text
    code, text = transcribe(folder / "model", folder / "low.wav", empty, folder / "high.wav", "--json")
    low, no, high = json.loads(text)
    assert code == 1 and no == {"audio": str(empty), "error": f"{empty} must not be empty; got 0 samples"}
    assert all("text" in record for record in (low, high))


def test_recordings_are_checked_before_the_model(folder: Path) -> None:
    other = folder / "other" / "low.wav"
    other.parent.mkdir()
    other.write_bytes(b"<html>")
    code, text = transcribe("no-model", folder / "low.wav", other)
    assert code != 0 and f"{other} must be a file in one of the formats" in text
    code, text = transcribe("no-model", folder / "none.wav")
    assert code != 0 and "AUDIO must be a file or a URL; there is no such file" in text
    code, text = transcribe("no-model", folder / "low.wav", other, "--out", folder)
    assert code != 0 and f"--out needs recordings of different names; {folder / 'low.wav'} has" in text


def test_a_reference_needs_one_recording(folder: Path) -> None:
    words = folder / "reference.txt"
    words.write_text("a word")
    code, text = transcribe(folder / "model", "a.wav", "b.wav", "--reference", words)
    assert code != 0 and "needs exactly one recording" in text


def write_rows(file: Path, *rows: dict[str, object]) -> Path:
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def test_a_bench_counts_wrong_words_where_the_words_are_known(folder: Path) -> None:
    first, second = SpeechPipeline.from_pretrained(folder / "model")(
        [folder / "low.wav", folder / "high.wav"]
    ).text
    wrong = " ".join("zz" for _ in second.split())
    rows = write_rows(
        folder / "recordings.jsonl",
        {"audio": "low.wav", "text": first.upper() + "."},
        {"audio": "high.wav", "text": wrong, "voice": "en-us", "rate": 130},
        {"audio": "low.wav"},
    )
    asked = ("--prompt-file", rows, "--repeats", 1, "--batch-size", 2)
    code, text = run("bench", folder / "model", *asked, "--json")
    found = json.loads(text)
    plain, copied = found["records"]
    assert code == 0 and (plain["accelerator"], copied["accelerator"]) == ("none", "copy")
    for record in (plain, copied):
        assert (record["identical"], record["samples"], record["new_tokens"]) == (1.0, 3, 3 * 24)
        share = len(second.split()) / len(f"{first} {second}".split())
        assert record["word_error_rate"] == pytest.approx(share) and 0 < share < 1
    assert plain["acceptance_length"] == 1 < copied["acceptance_length"]
    assert found["settings"]["task"] == str(rows) and "max_new_tokens" not in found["settings"]


def test_a_bench_shows_word_errors_unless_jiwer_is_missing(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = write_rows(folder / "one.jsonl", {"audio": "low.wav", "text": "a word"})
    asked = ("bench", folder / "model", "--prompt-file", rows, "--repeats", 1, "--max-new-tokens", 2)
    assert "errors" in run(*asked)[1]
    monkeypatch.setitem(sys.modules, "jiwer", None)
    code, text = run(*asked)
    assert code == 0 and "errors" not in text and "first" in text


@pytest.mark.parametrize(
    ("command", "row", "rule"),
    [
        (["bench"], None, "--prompt-file must be JSONL of recordings"),
        (["bench"], {"prompt": "a"}, 'must be {"audio": path'),
        (["bench"], {"audio": "none.wav"}, "rows.jsonl:1: audio must be a URL, or a file"),
        (["bench"], {"audio": "low.wav", "text": 1}, "rows.jsonl:1: text must be a string"),
        (["bench", "--peers"], {"audio": "low.wav"}, "--peers must be left out for speech models"),
        (["bench", "--compile"], {"audio": "low.wav"}, "--compile must be left out for speech models"),
        (["check"], {"audio": "low.wav"}, "must not be a speech model; mmspec transcribe --compare"),
    ],
)
def test_what_a_bench_of_speech_refuses(
    folder: Path, command: list[str], row: dict[str, object] | None, rule: str
) -> None:
    given = [] if row is None else ["--prompt-file", write_rows(folder / "rows.jsonl", row)]
    code, text = run(command[0], folder / "model", *command[1:], *given)
    assert code != 0 and rule in text


def test_other_models_refuse_recordings(folder: Path, tiny_folder: Path) -> None:
    rows = write_rows(folder / "rows.jsonl", {"audio": "low.wav"})
    for command, rule in (("bench", "must have prompts, not recordings"), ("caption", "must be a prompt")):
        code, text = run(command, tiny_folder, "--prompt-file", rows)
        assert code != 0 and rule in text
