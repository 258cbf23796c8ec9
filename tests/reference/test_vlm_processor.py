"""Processors of the reference models: round trips of text, loaded with transformers only."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from transformers import AutoProcessor, LlavaProcessor

from mmspec.scenes import CAPTION_PROMPTS, caption, describe, questions, render, sample_scene
from reference.processors import build_processor

IMAGE = {"type": "image"}


@pytest.fixture(scope="module")
def processor() -> LlavaProcessor:
    return build_processor()


@given(st.integers(min_value=0, max_value=2**62))
@settings(max_examples=50, deadline=None)
def test_text_survives_encoding_and_decoding_without_an_unknown_token(
    processor: LlavaProcessor, seed: int
) -> None:
    tokenizer = processor.tokenizer
    scene = sample_scene(seed)
    asked = questions(scene, np.random.default_rng(seed), 4)
    for text in (caption(scene), describe(scene), *(q.text for q in asked), *(q.answer for q in asked)):
        ids = tokenizer.encode(text, add_special_tokens=False)
        assert tokenizer.unk_token_id not in ids
        assert tokenizer.decode(ids) == text
        assert tokenizer.encode(tokenizer.decode(ids), add_special_tokens=False) == ids


def test_a_saved_processor_loads_without_this_package(processor: LlavaProcessor, tmp_path: Path) -> None:
    processor.save_pretrained(tmp_path)
    loaded = AutoProcessor.from_pretrained(tmp_path)
    assert type(loaded).__name__ == "LlavaProcessor"
    messages = [{"role": "user", "content": [IMAGE, {"type": "text", "text": CAPTION_PROMPTS[0]}]}]
    assert loaded.apply_chat_template(messages, add_generation_prompt=True) == (
        f"<bos><user><image>{CAPTION_PROMPTS[0]}<assistant>"
    )
    assert loaded.tokenizer.get_vocab() == processor.tokenizer.get_vocab()


def test_the_template_handles_turns_systems_and_several_images(processor: LlavaProcessor) -> None:
    messages: list[Any] = [
        {"role": "system", "content": "be brief."},
        {"role": "user", "content": [IMAGE, IMAGE, {"type": "text", "text": "what do you see? "}]},
        {"role": "assistant", "content": [{"type": "text", "text": "a star."}]},
        {"role": "user", "content": "where is it?"},
    ]
    text = processor.apply_chat_template(messages, add_generation_prompt=True)
    assert text == (
        "<bos><system>be brief.<user><image><image>what do you see?<assistant>a star.<eos>"
        "<user>where is it?<assistant>"
    )
    images = [Image.fromarray(render(sample_scene(seed))) for seed in range(2)]
    inputs = processor(text=text, images=images, return_tensors="pt")
    ids = inputs["input_ids"][0].tolist()
    assert ids.count(processor.image_token_id) == 2 * 64
    assert ids.count(processor.tokenizer.bos_token_id) == 1
    assert inputs["pixel_values"].shape == (2, 3, 96, 96)
