"""Speech pipelines: transcripts equal those of `generate`, for every form of audio; settings and refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import pipeline

import mmspec
from mmspec import MMSpecPipeline, SpeechPipeline
from mmspec.errors import InputError, MediaError
from mmspec.methods.medusa.head import MedusaHead
from mmspec.pipelines.speech import segments_of
from mmspec.targets import adapt
from tests.media.files import sound, tone
from tests.tiny_models.speech import tiny_speech_model, tiny_whisper_with_times

RATE = 16_000
GREEDY = {"num_beams": 1}  # the default of transformers' pipeline is a beam search, which has no drafts
TONES = [tone(seconds=seconds, hertz=hertz) for seconds, hertz in ((0.5, 440), (1.2, 700), (0.3, 200))]


@pytest.fixture(scope="module")
def pipe() -> SpeechPipeline:
    return SpeechPipeline(*tiny_speech_model())


@pytest.fixture(scope="module")
def whisper() -> SpeechPipeline:
    return SpeechPipeline(*tiny_whisper_with_times(), "copy")


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


def test_whisper_reads_long_recordings_beside_short_ones(whisper: SpeechPipeline) -> None:
    recognizer = recognizer_of(whisper)
    sounds = [np.concatenate(TONES), TONES[0], np.concatenate(TONES[:2]), TONES[2]]
    is_long = [len(samples) > RATE for samples in sounds]  # windows have one second
    assert is_long == [True, False, True, False]
    for timed in (False, True):
        how = [{"return_timestamps": True} if timed or long else {} for long in is_long]
        plain = [
            recognizer(given(samples.copy()), generate_kwargs=GREEDY, **each)
            for samples, each in zip(sounds, how, strict=True)
        ]
        output = whisper([(samples, RATE) for samples in sounds], batch_size=4, return_timestamps=timed)
        assert output.text == [one["text"] for one in plain] and len(set(output.text)) == 4
        times = [[(each.start, each.end) for each in row] for row in output.segments]
        chunks = [one["chunks"] if timed else [] for one in plain]
        assert times == [
            [(each.start, each.end) for each in segments_of(row, len(samples) / RATE)]
            for row, samples in zip(chunks, sounds, strict=True)
        ]
    assert len(times[0]) > 1


@pytest.mark.parametrize("kind", ["pipe", "whisper"])
def test_heads_attend_to_the_encoder_of_recordings_with_masks(
    kind: str, request: pytest.FixtureRequest
) -> None:
    """The processor masks samples, or frames of a spectrogram: more than the encoder has states."""
    given: SpeechPipeline = request.getfixturevalue(kind)
    target = adapt(given.model)
    config = MedusaHead.config_class.for_target(target.config, target.vocabulary, merged_states=3)
    head = MedusaHead(config).eval()
    recordings = [sound(tone(seconds=seconds)) for seconds in (0.4, 0.9)]
    plain = given(recordings, batch_size=2)
    fast = SpeechPipeline(given.model, given.processor, accelerator="medusa", drafter=head)(
        recordings, batch_size=2
    )
    assert fast.tokens == plain.tokens and fast.stats.accelerator == "medusa"
    assert sum(fast.stats.drafted) > 0


def test_a_prompt_leaves_room_for_the_output(whisper: SpeechPipeline) -> None:
    texts = [whisper((TONES[0], RATE), prompt=prompt).text for prompt in (None, "", "ab", "a" * 50)]
    assert texts[0] == texts[1] != texts[2]
    assert sum(whisper((TONES[0], RATE), prompt="a" * 50).stats.new_tokens) <= 64 - 52 - 2
    with pytest.raises(InputError, match="prompt must have at most 61 tokens"):
        whisper((TONES[0], RATE), prompt="a" * 60)
    with pytest.raises(InputError, match="must be at most 62: the prompt has 0 tokens"):
        whisper((TONES[0], RATE), max_new_tokens=63)


def test_times_that_were_not_predicted_are_completed() -> None:
    chunks = [{"timestamp": times, "text": ""} for times in ((None, 1.0), (1.5, 2.0), (None, None))]
    for seconds, last in ((2.5, 2.5), (1.9, 2.0)):
        found = [(each.start, each.end) for each in segments_of(chunks, seconds)]
        assert found == [(0.0, 1.0), (1.5, 2.0), (2.0, last)]


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


def test_scores_that_whisper_needs_are_left_to_transformers(whisper: SpeechPipeline) -> None:
    recognizer = recognizer_of(SpeechPipeline(*tiny_whisper_with_times()))
    how = {**GREEDY, "temperature": (0.0, 0.5), "logprob_threshold": -1.0}
    outputs = []
    for _ in range(2):
        torch.manual_seed(0)
        sound = given(np.concatenate(TONES))
        outputs.append(recognizer(sound, return_timestamps=True, generate_kwargs=how.copy()))
        mmspec.enable(recognizer, "copy")
    assert outputs[0] == outputs[1]
    assert mmspec.summary(recognizer)[0].calls == 0


@pytest.mark.parametrize(
    ("arguments", "kind", "expected"),
    [
        ({"audio": []}, InputError, "at least one recording"),
        ({"audio": b""}, MediaError, "must not be empty"),
        ({"audio": [(TONES[0], RATE), b"x"]}, MediaError, r"audio\[1\] must be a file in one of the formats"),
        ({"language": "en"}, InputError, "must be None"),
        ({"prompt": "names"}, InputError, "takes no prompt"),
        ({"num_beams": 4}, InputError, "num_beams must be left out: beam search"),
        ({"num_return_sequences": 2}, InputError, "must be left out: a recording has one"),
        ({"generate_kwargs": {"num_beams": 1}}, InputError, "must be left out: pass its entries"),
        ({"streamer": None}, InputError, "one of assistant_model, logits"),
        ({"max_new_tokens": 0}, InputError, "must be an integer of at least 1"),
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
