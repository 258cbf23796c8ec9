"""Loading of audio as samples of one channel. A child process decodes files, as for videos."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from mmspec.errors import MediaError
from mmspec.media.decoding import Child, decode, require_pyav
from mmspec.media.limits import DEFAULT_LIMITS, Described, MediaLimits
from mmspec.media.pixels import as_numpy, is_array
from mmspec.media.source import file_format, read_source

__all__ = ["load_audio", "read_audio_file"]

_FORMATS = ("WAV", "FLAC", "MP3", "AAC", "Ogg", "MP4", "Matroska or WebM")
_SAMPLES = ("array", "raw")  # keys of a dict: of datasets and of transformers' pipelines
_MOST_CHANNELS = 32
_LOUDEST = 2.0  # decoded or resampled sound may exceed full scale, 1.0, a little
_RATES = (1000, 768_000)  # samples per second


def load_audio(
    source: object,
    *,
    sampling_rate: int = 16_000,
    argument: str = "audio",
    limits: MediaLimits = DEFAULT_LIMITS,
) -> np.ndarray:
    """Load the sound of an audio or video file, or samples, as one channel at a given rate.

    Args:
        source: a path, bytes, an open file, base64, a `data:` URL or a public http(s) URL of a WAV, FLAC,
            MP3, AAC, Ogg, MP4 (M4A), Matroska or WebM file, or a dict with one of these; or samples with
            their rate: `{"array": samples, "sampling_rate": rate}` as datasets have it, `(rate, samples)` or
            `(samples, rate)`. Samples are [n], [channels, n] or [n, channels], integers at their full scale
            or floats with the full scale 1.0.
        sampling_rate: samples per second of the result, as the model's feature extractor needs them.
        argument: name of the argument in error messages.
        limits: limits; `max_audio_bytes`, `max_audio_seconds` and those of decoding apply.

    Returns:
        The mean of the channels, float32 [n].

    Raises:
        MediaError: the audio is unreadable, damaged, empty, of an unsupported format, has no rate, or exceeds
            a limit, including the time and memory for decoding.
        MissingDependencyError: PyAV, which decodes and resamples, is not installed.
    """
    given = _given_samples(source, argument)
    if given is not None:
        samples, rate = given
        mono = _mono(samples, argument)
        _check_length(len(mono), rate, argument, limits)
        return mono if rate == sampling_rate else _resample(mono, rate, sampling_rate)
    data = read_audio_file(source, argument=argument, limits=limits)
    require_pyav("audio")
    most = int(limits.max_audio_seconds * sampling_rate)

    def converse(child: Child) -> np.ndarray:
        total = child.open(data, "audio", rate=sampling_rate, most=most)["total"]
        _check_length(total, sampling_rate, argument, limits)
        return np.frombuffer(child.read(total * 4), np.float32)

    return decode(data, converse, argument=argument, limits=limits)


def read_audio_file(
    source: object, *, argument: str = "audio", limits: MediaLimits = DEFAULT_LIMITS
) -> bytes:
    """Read the bytes of an audio or video file; its format is checked, and nothing is decoded.

    Args:
        source, argument, limits: as in `load_audio`, without samples.

    Raises:
        MediaError: the file is unreadable, empty, too large, or of an unsupported format.
    """
    data = read_source(source, argument=argument, limits=limits, max_bytes="max_audio_bytes", kind="audio")
    name = file_format(data)
    if name not in _FORMATS:  # also refuses playlists, with which FFmpeg would open other files
        rule = f"must be a file in one of the formats {', '.join(_FORMATS)}"
        raise MediaError(argument, Described(f"{name} data"), rule)
    return data


def _given_samples(source: object, argument: str) -> tuple[Any, int] | None:
    """Return samples and their rate; None for a file."""
    if is_array(source):
        raise MediaError(
            argument, source, 'must come with its rate, as {"array": samples, "sampling_rate": 16000}'
        )
    samples: object
    rate: object
    if isinstance(source, Mapping) and any(key in source for key in _SAMPLES):
        samples = next(source[key] for key in _SAMPLES if key in source)
        rate = source.get("sampling_rate")
    elif isinstance(source, tuple) and len(source) == 2 and any(map(is_array, source)):
        samples, rate = source if is_array(source[0]) else source[::-1]
    else:
        return None
    if isinstance(rate, float) and rate.is_integer():  # of librosa, for example
        rate = int(rate)
    if isinstance(rate, bool) or not isinstance(rate, int | np.integer):
        raise MediaError(
            argument, rate, "must have the sampling rate as an integer number of samples per second"
        )
    slowest, fastest = _RATES
    if not slowest <= rate <= fastest:
        rule = f"must have a sampling rate between {slowest:,} and {fastest:,} samples per second"
        raise MediaError(argument, rate, rule)
    return samples, int(rate)


def _mono(samples: Any, argument: str) -> np.ndarray:
    """Convert samples to the mean of their channels, float32 [n]."""
    array = as_numpy(samples, argument) if is_array(samples) else np.asarray(samples)
    if array.ndim not in (1, 2) or (array.ndim == 2 and min(array.shape) > _MOST_CHANNELS):
        rule = (
            f"must have the shape [n], [channels, n] or [n, channels], with at most {_MOST_CHANNELS} channels"
        )
        raise MediaError(argument, samples, rule)
    if np.issubdtype(array.dtype, np.signedinteger):
        scale = -float(np.iinfo(array.dtype).min)
    elif np.issubdtype(array.dtype, np.floating):
        scale = 1.0
    else:
        raise MediaError(argument, str(array.dtype), "must have samples that are floats or signed integers")
    if array.ndim == 2:
        array = array.mean(axis=int(array.shape[0] > array.shape[1]), dtype=np.float64)
    mono = (array / scale).astype(np.float32)
    if not (np.abs(mono) <= _LOUDEST).all():  # also refuses NaN
        raise MediaError(argument, samples, "must have finite samples whose full scale is 1.0 for floats")
    return mono


def _check_length(total: int, rate: int, argument: str, limits: MediaLimits) -> None:
    if total == 0:
        raise MediaError(argument, Described("0 samples"), "must not be empty")
    if total > limits.max_audio_seconds * rate:
        rule = limits.rule("max_audio_seconds", "must last at most {} seconds")
        raise MediaError(
            argument, Described(f"audio of more than {limits.max_audio_seconds:,} seconds"), rule
        )


def _resample(mono: np.ndarray, rate: int, wanted: int) -> np.ndarray:
    require_pyav("audio")
    import av

    frame = av.AudioFrame.from_ndarray(mono[None], format="fltp", layout="mono")
    frame.sample_rate = rate
    resampler = av.AudioResampler(format="fltp", rate=wanted)
    frames = [*resampler.resample(frame), *resampler.resample(None)]
    return np.concatenate([each.to_ndarray()[0] for each in frames])
