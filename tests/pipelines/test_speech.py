"""Speech pipelines: transcripts equal those of `generate`, for every form of audio; settings and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import pipeline

import mmspec
from mmspec import MMSpecPipeline, SpeechPipeline
from mmspec.errors import InputError, MediaError
from tests.media.files import sound, tone
from tests.tiny_models.speech import tiny_speech_model

RATE = 16_000
GREEDY = {"num_beams": 1}  # the default of transformers' pipeline is a beam search, which has no drafts
TONES = [tone(seconds=seconds, hertz=hertz) for seconds, hertz in ((0.5, 440), (1.2, 700), (0.3, 200))]


@pytest.fixture(scope="module")
def pipe() -> SpeechPipeline:
    return SpeechPipeline(*tiny_speech_model())


def recognizer_of(pipe: SpeechPipeline) -> Any:
    """The pipeline of transformers with the same parts."""
    extractor = pipe.processor.feature_extractor
    task = "automatic-speech-recognition"
    return pipeline(task, model=pipe.model, tokenizer=pipe.tokenizer, feature_extractor=extractor)


def given(samples: Any) -> dict[str, Any]:
    """A recording as that pipeline takes it."""
    return {"raw": samples, "sampling_rate": RATE}


@pytest.mark.parametrize("accelerator", ["none", "copy"])
@pytest.mark.parametrize("batch_size", [1, 3])
def test_transcripts_equal_generate(pipe: SpeechPipeline, accelerator: str, batch_size: int) -> None:
    plain = recognizer_of(pipe)(list(map(given, TONES)), batch_size=batch_size, generate_kwargs=GREEDY)
    expected = [one["text"] for one in plain]
    assert len(set(expected)) == len(TONES)
    pipe.set_accelerator(accelerator)
    output = pipe([(samples, RATE) for samples in TONES], batch_size=batch_size)
    assert output.text == expected
    assert output.segments == [[], [], []]
    assert [pipe.tokenizer.decode(ids, skip_special_tokens=True) for ids in output.tokens] == expected
    stats = output.stats
    assert stats.accelerator == accelerator and sum(stats.new_tokens) == 24 * len(TONES)
    assert (stats.target_forwards < 24 * len(TONES) // batch_size) == (accelerator == "copy")


def test_sampling_is_repeatable_and_follows_settings(pipe: SpeechPipeline) -> None:
    pipe.set_accelerator("copy")
    how = {"do_sample": True, "temperature": 2.0, "max_new_tokens": 8}
    drawn = [pipe((TONES[0], RATE), seed=seed, **how).text[0] for seed in (0, 0, 1)]
    assert drawn[0] == drawn[1] != drawn[2]
    assert sum(pipe((TONES[0], RATE), max_new_tokens=5).stats.new_tokens) == 5


def test_a_saved_model_transcribes_a_file(pipe: SpeechPipeline, tmp_path: Path) -> None:
    pipe.save_pretrained(tmp_path / "model")
    loaded = MMSpecPipeline.from_pretrained(tmp_path / "model", dtype=torch.float32)
    assert isinstance(loaded, SpeechPipeline)
    path = tmp_path / "tone.flac"
    path.write_bytes(sound(TONES[0], container="flac", codec="flac"))
    output = loaded(path)
    assert output.text == loaded(str(path)).text == loaded(path.read_bytes()).text
    assert isinstance(loaded(path, return_dict=False), tuple)
    assert output.text[0].strip() in str(output)


def test_an_enabled_pipeline_of_transformers_is_accelerated(pipe: SpeechPipeline) -> None:
    recognizer = recognizer_of(pipe)
    plain = recognizer(given(TONES[0]), generate_kwargs=GREEDY)
    mmspec.enable(recognizer, "copy")
    try:
        assert recognizer(given(TONES[0]), generate_kwargs=GREEDY) == plain
        assert mmspec.summary(recognizer)[0].calls == 1
    finally:
        mmspec.disable(recognizer)


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ({"audio": []}, InputError, "at least one recording"),
        ({"audio": b""}, MediaError, "must not be empty"),
        ({"audio": [(TONES[0], RATE), b"x"]}, MediaError, r"audio\[1\] must be a file in one of the formats"),
        ({"language": "en"}, InputError, "must be None"),
        ({"prompt": "names"}, InputError, "takes no prompt"),
        ({"num_beams": 4}, InputError, "is not a setting"),
        ({"max_tokens": 4}, InputError, "did you mean"),
        ({"return_timestamps": True}, InputError, "tells no times"),
        ({"return_timestamps": "word"}, InputError, "times of words need attention weights"),
        ({"batch_size": 0}, InputError, "at least 1"),
    ],
)
def test_what_is_refused(pipe: SpeechPipeline, arguments: Any, kind: type[Exception], expected: str) -> None:
    with pytest.raises(kind, match=expected):
        pipe(**{"audio": (TONES[0], RATE), **arguments})


def test_a_running_batch_is_refused_by_name(pipe: SpeechPipeline) -> None:
    with pytest.raises(InputError, match="not available for speech models"):
        pipe.running_batch()
