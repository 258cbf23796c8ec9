"""Audio: containers, rates, channels, samples with their rate, and what is refused."""

from __future__ import annotations

import base64
import io
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from mmspec.errors import MediaError, MissingDependencyError
from mmspec.media import MediaLimits, load_audio
from tests.media.files import clip, encoded, noise, sound, tone

TONE = tone()
WAV = sound(TONE)
STEP = 1 / 2**15  # of 16-bit samples


def loudest_frequency(samples: np.ndarray, rate: int) -> float:
    """Frequency of the largest Fourier coefficient, in hertz."""
    return float(np.abs(np.fft.rfft(samples)).argmax() * rate / len(samples))


@pytest.mark.parametrize(
    ("container", "codec", "error"),
    [
        ("wav", "pcm_s16le", STEP),
        ("wav", "pcm_u8", 1 / 2**7),
        ("flac", "flac", STEP),
        ("ogg", "libopus", 0.1),
        ("mp3", "libmp3lame", 0.1),
        ("ipod", "aac", 0.1),
        ("adts", "aac", 0.1),
        ("webm", "libopus", 0.1),
        ("matroska", "pcm_s16le", STEP),
    ],
)
def test_samples_of_every_container(container: str, codec: str, error: float) -> None:
    if codec == "libopus":
        data = sound(tone(48_000), 48_000, container=container, codec=codec)
    else:
        data = sound(TONE, container=container, codec=codec)
    samples = load_audio(data)
    assert samples.dtype == np.float32 and samples.ndim == 1
    assert abs(len(samples) - len(TONE)) < 3000  # encoders pad to whole frames
    assert abs(loudest_frequency(samples, 16_000) - 440) < 4
    if error <= 1 / 2**7:  # lossless codecs keep each sample
        assert np.abs(samples - TONE).max() <= error


@pytest.mark.parametrize("rate", [8_000, 44_100, 192_000])
def test_other_rates_and_two_channels(rate: int) -> None:
    left = tone(rate)
    data = sound(np.stack([left, np.zeros_like(left)]), rate)
    samples = load_audio(data)
    assert abs(len(samples) - 8_000) <= 2
    assert abs(loudest_frequency(samples, 16_000) - 440) < 4
    inner = samples[1000:-1000]
    assert abs(np.abs(inner).max() - 0.25) < 0.01  # the mean of both channels
    assert abs(len(load_audio(data, sampling_rate=24_000)) - 12_000) <= 2


@pytest.mark.parametrize(
    "source",
    [
        {"array": TONE, "sampling_rate": 16_000},
        {"raw": torch.tensor(TONE), "sampling_rate": 16_000},
        (16_000, np.rint(TONE * 2**15).astype(np.int16)),
        (TONE.astype(np.float64), 16_000.0),
        {"array": np.stack([TONE, TONE]), "sampling_rate": 16_000},
        {"array": np.stack([TONE, TONE], axis=1), "sampling_rate": 16_000},
        {"array": TONE.tolist(), "sampling_rate": 16_000},
        WAV,
        io.BytesIO(WAV),
        base64.b64encode(WAV).decode(),
        {"bytes": WAV, "path": None},
        "data:audio/wav;base64," + base64.b64encode(WAV).decode(),
    ],
)
def test_every_kind_of_source_gives_the_same_samples(source: Any) -> None:
    assert np.abs(load_audio(source) - TONE).max() <= STEP


def test_samples_are_resampled_like_a_file() -> None:
    high = tone(48_000)
    samples = load_audio((high, 48_000))
    assert abs(len(samples) - 8_000) <= 2
    assert abs(loudest_frequency(samples, 16_000) - 440) < 4


def test_a_file_by_its_path_whatever_its_extension(tmp_path: Path) -> None:
    path = tmp_path / "speech.mp3"
    path.write_bytes(WAV)
    assert np.abs(load_audio(path) - TONE).max() <= STEP


@pytest.mark.parametrize("mode", ["rb", "r+b"])
def test_an_open_file_is_read_from_its_start_and_keeps_its_position(mode: str, tmp_path: Path) -> None:
    (tmp_path / "speech.wav").write_bytes(WAV)
    with open(tmp_path / "speech.wav", mode) as file:
        file.seek(7)
        assert np.abs(load_audio(file) - TONE).max() <= STEP
        assert file.tell() == 7
        with pytest.raises(MediaError, match="must have at most 100 bytes"):
            load_audio(file, limits=MediaLimits(max_audio_bytes=100))
    with pytest.raises(MediaError, match="must not be closed"):
        load_audio(file)


def test_silence_is_sound_and_a_truncated_file_gives_what_it_has() -> None:
    assert not load_audio(sound(np.zeros(1600, np.float32))).any()
    assert 7000 < len(load_audio(WAV[:-1500])) < 8000


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (b"", "must not be empty"),
        (WAV[: WAV.index(b"data") + 8], "must not be empty"),  # a header without samples
        ({"array": np.zeros(0), "sampling_rate": 16_000}, "must not be empty"),
        (TONE, "must come with its rate"),
        ({"audio": {"array": TONE, "sampling_rate": 16_000}}, "samples with their rate.* the keys 'audio'"),
        ({"array": TONE}, "must have the sampling rate as an integer"),
        ({"array": TONE, "sampling_rate": True}, "must have the sampling rate as an integer"),
        ({"array": TONE, "sampling_rate": 4}, "between 1,000 and 768,000"),
        ((TONE * np.nan, 16_000), "finite samples"),
        ((TONE * 30_000, 16_000), "full scale"),
        ((np.zeros(10, np.uint8), 16_000), "floats or signed integers; got 'uint8'"),
        ((np.zeros((100, 100)), 16_000), "at most 32 channels"),
        (WAV[:20], "is damaged, truncated"),
        (clip(), "must contain an audio stream"),
        (encoded(noise(), "PNG"), "one of the formats WAV, FLAC"),
        (b"#EXTM3U\nfile:///etc/passwd", "one of the formats WAV, FLAC"),
        ("data:image/png;base64,AAAA", "starts with audio/"),
        (3, "must be a path, bytes"),
        ("no-such-file.wav", "there is no such file"),
    ],
)
def test_what_is_refused(source: Any, expected: str) -> None:
    with pytest.raises(MediaError, match=expected):
        load_audio(source)


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({"max_audio_bytes": 100}, "at most 100 bytes"),
        ({"max_audio_seconds": 0.25}, "at most 0.25 seconds"),
        ({"decode_timeout_s": 1e-3}, "within at most 0.001 seconds"),
    ],
)
def test_limits_and_how_to_raise_them(limits: dict[str, Any], expected: str) -> None:
    (name,) = limits
    with pytest.raises(MediaError, match=f"{expected}.*MediaLimits\\({name}="):
        load_audio(WAV, limits=MediaLimits(**limits))


def test_samples_have_the_same_limit_of_duration() -> None:
    with pytest.raises(MediaError, match="at most 0.25 seconds"):
        load_audio((TONE, 16_000), limits=MediaLimits(max_audio_seconds=0.25))


def test_a_duration_in_the_header_is_checked_before_decoding() -> None:
    data = sound(tone(seconds=6), container="flac", codec="flac")
    half = data[: len(data) // 2]  # decoding fails after three seconds
    for seconds, expected in ((4, "at most 4 seconds"), (7, "is damaged")):
        with pytest.raises(MediaError, match=expected):
            load_audio(half, limits=MediaLimits(max_audio_seconds=seconds))


def test_without_a_decoding_library_the_message_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(MissingDependencyError, match="pip install av"):
        load_audio(WAV)
    assert np.array_equal(load_audio((TONE, 16_000)), TONE)


def test_mutated_files_raise_nothing_but_media_errors(capfd: pytest.CaptureFixture[str]) -> None:
    for seed, data in enumerate([WAV, sound(TONE, container="mp3", codec="libmp3lame")] * 3):
        random, spoilt = np.random.default_rng(seed), bytearray(data)
        for place in random.integers(4, len(data), 8):
            spoilt[int(place)] = int(random.integers(256))
        try:
            assert np.isfinite(load_audio(bytes(spoilt))).all()
        except MediaError as error:
            assert len(str(error)) < 400
    assert capfd.readouterr() == ("", "")
