"""`/v1/audio/transcriptions`: the official client, formats, errors, and requests at once."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

from mmspec import SpeechPipeline
from tests.media.files import sound, tone
from tests.serving.conftest import Server, running
from tests.tiny_models.speech import tiny_speech_model, tiny_whisper_with_times

FILES = [sound(tone(hertz=hertz)) for hertz in (200, 440, 700)]


@pytest.fixture(scope="module")
def speech() -> Iterator[Server]:
    models = {"tiny": tiny_speech_model(), "whisper": tiny_whisper_with_times()}
    with running(pipelines={name: SpeechPipeline(*parts) for name, parts in models.items()}) as server:
        yield server


def transcript(server: Server, file: bytes, **fields: Any) -> Any:
    return server.client.audio.transcriptions.create(file=("a.wav", file), **{"model": "tiny", **fields})


def test_transcripts_at_once_are_those_of_the_pipeline(speech: Server) -> None:
    own = SpeechPipeline(*tiny_speech_model())
    with ThreadPoolExecutor(6) as threads:
        found = list(threads.map(lambda file: transcript(speech, file).text, FILES * 2))
    assert found == [own(file).text[0].strip() for file in FILES] * 2
    assert transcript(speech, FILES[0], response_format="text").strip() == found[0]


def test_whisper_takes_a_prompt_and_tells_times(speech: Server) -> None:
    own = SpeechPipeline(*tiny_whisper_with_times())
    recording = sound(tone(seconds=1.5))  # more than its window of a second
    expected = own(recording, prompt="ab", return_timestamps=True)
    how = {"model": "whisper", "prompt": "ab"}
    found = transcript(speech, recording, response_format="verbose_json", **how)
    assert (found.text, found.duration) == (expected.text[0].strip(), 1.5)
    assert [each.end for each in found.segments] == [each.end for each in expected.segments[0]]
    assert transcript(speech, recording, **how).text == found.text != own(recording).text[0].strip()


def test_sampling_and_fields_without_effect(speech: Server) -> None:
    how = {"temperature": 1.5, "extra_body": {"seed": 3}}
    drawn = [transcript(speech, FILES[0], **how).text for _ in range(2)]
    assert drawn[0] == drawn[1] != transcript(speech, FILES[0]).text


@pytest.mark.parametrize(
    ("fields", "status", "expected"),
    [
        ({"file": b"no sound at all"}, 400, "file must be a file in one of the formats"),
        ({"file": FILES[0], "language": "en"}, 400, "language must be None"),
        ({"file": FILES[0], "response_format": "srt"}, 400, "tells no times"),
        ({"file": FILES[0], "timestamp_granularities": ["word"]}, 400, "hould be .segment."),
        ({"file": FILES[0], "response_format": "doc"}, 400, "response_format"),
        ({"file": FILES[0], "extra_body": {"lanugage": "en"}}, 400, "did you mean 'language'"),
        ({"file": FILES[0], "extra_body": {"known_speaker_names[]": "A"}}, 400, "not supported"),
    ],
)
def test_what_is_refused(speech: Server, fields: dict[str, Any], status: int, expected: str) -> None:
    file = fields.pop("file")
    with pytest.raises(openai.APIStatusError, match=expected) as refused:
        transcript(speech, file, **fields)
    assert refused.value.status_code == status


def test_other_routes_and_models_name_what_they_make(speech: Server, server: Server) -> None:
    with pytest.raises(openai.BadRequestError, match="must be one that makes text"):
        speech.client.chat.completions.create(model="tiny", messages=[{"role": "user", "content": "a"}])
    with pytest.raises(openai.BadRequestError, match="must be one that makes transcripts"):
        server.client.audio.transcriptions.create(file=("a.wav", FILES[0]), model="scenes-llava")
