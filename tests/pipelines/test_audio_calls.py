"""Calls with audio: equal to `generate`, alone and in batches, for every form of prompt; and refusals."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import PreTrainedModel, ProcessorMixin

import mmspec
from mmspec import MMSpecPipeline, VisionLanguagePipeline
from mmspec.errors import InputError, MediaError
from mmspec.targets.vision_language import adapt
from tests.media.files import sound, tone
from tests.tiny_models import audio_language
from tests.tiny_models.audio_language import tiny_omni_thinker, tiny_qwen2_audio
from tests.tiny_models.processors import tiny_tokenizer
from tests.tiny_models.text import tiny_lm

RATE = 16_000
TONES = [tone(seconds=seconds, hertz=hertz) for seconds, hertz in ((0.5, 440), (1.2, 700), (0.3, 200))]
BASE64 = base64.b64encode(sound(TONES[0])).decode()
NEW: dict[str, Any] = {"max_new_tokens": 12, "temperature": 0}

Tiny = tuple[PreTrainedModel, ProcessorMixin]


@pytest.fixture(scope="module")
def tiny() -> Tiny:
    return tiny_qwen2_audio()


@pytest.fixture(scope="module")
def pipe(tiny: Tiny) -> VisionLanguagePipeline:
    return VisionLanguagePipeline(*tiny)


def generated(tiny: Tiny, text: str, sounds: list[np.ndarray]) -> list[int]:
    """Output of `generate` for one user turn with its sounds in front."""
    model, processor = tiny
    parts = [{"type": "audio"} for _ in sounds] + [{"type": "text", "text": text}]
    turn = [{"role": "user", "content": parts}]
    templated = processor.apply_chat_template(turn, add_generation_prompt=True, tokenize=False)
    inputs = processor(
        text=[templated],
        audio=sounds or None,
        return_tensors="pt",
        audio_kwargs={"sampling_rate": RATE} if sounds else {},
    )
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    return list(output[0, inputs["input_ids"].shape[1] :].tolist())


@pytest.mark.parametrize("accelerator", ["none", "copy"])
def test_a_batch_of_sounds_equals_generate(tiny: Tiny, accelerator: str) -> None:
    pipe = VisionLanguagePipeline(*tiny, accelerator=accelerator)
    prompts = ["describe it", "what is it ?", "how many are there ?", "describe the other"]
    sounds = [[TONES[0]], [TONES[1]], [], [TONES[2], TONES[1]]]
    given = [[(one, RATE) for one in row] or None for row in sounds]
    expected = [generated(tiny, text, row) for text, row in zip(prompts, sounds, strict=True)]
    assert pipe(prompts, audio=given, **NEW).tokens == expected
    assert expected[0] != generated(tiny, prompts[0], []) and expected[1] != generated(tiny, prompts[1], [])


@pytest.mark.parametrize(
    "part",
    [
        {"type": "audio", "audio": {"array": TONES[0], "sampling_rate": RATE}},
        {"type": "audio", "audio": sound(TONES[0])},
        {"type": "audio", "base64": BASE64},
        {"type": "audio_url", "audio_url": {"url": f"data:audio/wav;base64,{BASE64}"}},
        {"type": "input_audio", "input_audio": {"data": BASE64, "format": "wav"}},
        {"type": "audio"},
    ],
)
def test_every_form_of_an_audio_part(pipe: VisionLanguagePipeline, tiny: Tiny, part: dict[str, Any]) -> None:
    messages = [{"role": "user", "content": [part, {"type": "text", "text": "describe it"}]}]
    audio = (TONES[0], RATE) if len(part) == 1 else None
    assert pipe(messages, audio=audio, **NEW).tokens == [generated(tiny, "describe it", [TONES[0]])]


def test_a_file_at_another_rate_and_the_stream(
    pipe: VisionLanguagePipeline, tiny: Tiny, tmp_path: Path
) -> None:
    path = tmp_path / "tone.flac"
    path.write_bytes(sound(TONES[0], container="flac", codec="flac"))
    expected = pipe("describe it", audio=path, **NEW).text[0]
    assert "".join(pipe.stream("describe it", audio=str(path), **NEW)) == expected
    high = pipe("describe it", audio=(tone(44_100), 44_100), **NEW)
    assert len(high.tokens[0]) == 12


def test_a_saved_model_is_loaded_by_its_folder(tiny: Tiny, tmp_path: Path) -> None:
    for each in tiny:
        each.save_pretrained(tmp_path)
    loaded = MMSpecPipeline.from_pretrained(str(tmp_path), dtype=torch.float32)
    assert isinstance(loaded, VisionLanguagePipeline)
    output = loaded("describe it", audio=(TONES[0], RATE), **NEW)
    assert output.tokens == [generated(tiny, "describe it", [TONES[0]])]


def test_what_is_refused(pipe: VisionLanguagePipeline) -> None:
    refused: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"images": "a.png"}, InputError, "does not accept images"),
        ({"audio": TONES[0]}, MediaError, "must come with its rate"),
        ({"audio": "no-such.wav"}, MediaError, "there is no such file"),
        ({"audio": b""}, MediaError, "must not be empty"),
    ]
    for arguments, kind, expected in refused:
        with pytest.raises(kind, match=expected):
            pipe("describe it", **arguments, **NEW)
    parts: list[tuple[dict[str, Any], str]] = [
        ({"type": "input_audio", "input_audio": "AAAA"}, "must be a dict with base64 under 'data'"),
        ({"type": "audio_url", "audio_url": "file.wav"}, "must be a data:, https:// or http:// URL"),
        ({"type": "audio"}, "must have one audio for each audio part"),
    ]
    for part, expected in parts:
        with pytest.raises(InputError, match=expected):
            pipe([{"role": "user", "content": [part]}], **NEW)


def test_models_without_ears_refuse_audio() -> None:
    text = VisionLanguagePipeline(tiny_lm(vocab=len(tiny_tokenizer())), tiny_tokenizer())
    with pytest.raises(InputError, match="does not accept audio"):
        text([{"role": "user", "content": [{"type": "audio", "audio": (TONES[0], RATE)}]}], **NEW)


def omni_inputs(seconds: float) -> dict[str, Tensor]:
    """A prompt of the thinker: text, a sound, an image of 2 x 3 tokens, text."""
    frames = round(100 * seconds)
    sounds = ((frames - 1) // 2 + 1 - 2) // 2 + 1
    own = audio_language
    start, end = own.AUDIO_START, 57
    ids = [5, 6, start, *[own.AUDIO] * sounds, end, 7, own.VISION_START, *[own.IMAGE] * 6, 56, 8, 9]
    generator = torch.Generator().manual_seed(0)
    return {
        "input_ids": torch.tensor([ids]),
        "attention_mask": torch.ones(1, len(ids), dtype=torch.long),
        "input_features": torch.randn(1, audio_language.MELS, frames, generator=generator),
        "feature_attention_mask": torch.ones(1, frames, dtype=torch.long),
        "pixel_values": torch.randn(24, 3 * 2 * 14 * 14, generator=generator),
        "image_grid_thw": torch.tensor([[1, 4, 6]]),
    }


def test_sounds_and_images_with_three_axes_of_positions() -> None:
    model = tiny_omni_thinker()
    inputs = omni_inputs(0.6)
    positions, offset = adapt(model).positions(inputs)
    expected, delta = model.get_rope_index(
        inputs["input_ids"],
        inputs["image_grid_thw"],
        None,
        inputs["attention_mask"],
        False,
        inputs["feature_attention_mask"].sum(-1),
    )
    assert torch.equal(positions, expected.long()) and offset == int(delta)
    plain = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    mmspec.enable(model, "copy")
    assert torch.equal(model.generate(**inputs, max_new_tokens=12, do_sample=False), plain)
