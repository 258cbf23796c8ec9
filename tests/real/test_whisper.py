"""Whisper tiny.en, if its package is installed: transcripts with drafts are those of `generate`."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import WhisperForConditionalGeneration, WhisperProcessor, pipeline

import mmspec
from benchmarks.real_speech import package_folder, write_folder
from mmspec.errors import MissingDependencyError
from mmspec.media import load_audio

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

RATE = 16_000
SENTENCES = (
    "The quick brown fox jumps over the lazy dog, and the dog does not mind at all.",
    "Several words are read at once. Several words are read at once. Several words are read at once.",
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    try:
        source = package_folder()
    except MissingDependencyError as error:
        pytest.skip(str(error))
    if shutil.which("espeak-ng") is None:
        pytest.skip("needs espeak-ng")
    out = tmp_path_factory.mktemp("whisper") / "model"
    write_folder(source, out)
    torch.set_num_threads(1)
    return out


@pytest.fixture(scope="module")
def sounds(tmp_path_factory: pytest.TempPathFactory) -> list[np.ndarray]:
    """The sentences, spoken by espeak-ng."""
    spoken = []
    for index, sentence in enumerate(SENTENCES):
        file = tmp_path_factory.mktemp("speech") / f"{index}.wav"
        subprocess.run(["espeak-ng", "-v", "en-us", "-w", str(file), sentence], check=True)
        spoken.append(load_audio(file))
    return spoken


def test_transcripts_of_a_batch_are_those_of_generate(folder: Path, sounds: list[Any]) -> None:
    model, processor = (
        kind.from_pretrained(folder) for kind in (WhisperForConditionalGeneration, WhisperProcessor)
    )
    inputs = processor(sounds, sampling_rate=RATE, return_tensors="pt")
    with torch.inference_mode():
        for settings in ({}, {"return_timestamps": True}):
            expected = model.generate(**inputs, **settings)
            loop = mmspec.accelerate("copy")
            assert torch.equal(model.generate(**inputs, **settings, custom_generate=loop), expected)
    texts = processor.batch_decode(expected, skip_special_tokens=True)
    assert "the dog does not mind at all" in texts[0] and texts[1].count("at once") >= 2
    assert sum(loop.stats.accepted) > 0


def test_pipeline_of_transformers_runs_accelerated(folder: Path, sounds: list[Any]) -> None:
    pipe = pipeline("automatic-speech-recognition", str(folder))
    greedy = {"num_beams": 1}  # the pipeline's default is a beam search, which has no drafts
    sound = {"raw": sounds[1], "sampling_rate": RATE}
    expected = pipe(dict(sound), generate_kwargs=greedy)
    mmspec.enable(pipe, "copy")
    assert pipe(dict(sound), generate_kwargs=greedy) == expected
    (summary,) = mmspec.summary(pipe)
    assert summary.calls == 1 and summary.tokens > summary.forwards


@pytest.mark.slow
def test_our_pipeline_tells_times_and_reads_more_than_a_window(folder: Path, sounds: list[Any]) -> None:
    pipe = mmspec.SpeechPipeline.from_pretrained(folder, accelerator="copy")
    long = np.concatenate([sounds[0], np.zeros(RATE, np.float32)] * 6)
    assert len(long) > 31 * RATE
    output = pipe((long, RATE), return_timestamps=True)
    plain = pipe.set_accelerator("none")((long, RATE), return_timestamps=True)
    assert (output.text, output.segments) == (plain.text, plain.segments)
    starts = [segment.start for segment in output.segments[0]]
    assert starts == sorted(starts) and starts[-1] > 25 and output.text[0].count("lazy dog") >= 4
    named = pipe((sounds[0], RATE), prompt="Foxes and dogs.")
    assert "dog" in named.text[0] and "Foxes and dogs." not in named.text[0]
