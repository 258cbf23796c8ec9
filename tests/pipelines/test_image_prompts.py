"""Prompts, labels and sizes become requests; unsupported ones raise errors before any work."""

from __future__ import annotations

import logging
from typing import Any

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from mmspec.errors import InputError
from mmspec.families.images import image_target
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.pipelines.image_prompts import image_requests
from tests.tiny_models import tiny_anole, tiny_emu3, tiny_janus, tiny_lumina, tiny_tokenizer

SIZES = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "vocab_size": 8, "grid_size": 4}
SLOTS, WIDTH = 6, 12


@pytest.fixture(scope="module")
def targets() -> dict[str, Any]:
    captions = LlamaGenConfig(**SIZES, condition_type="caption", caption_length=SLOTS, caption_dim=WIDTH)
    return {
        "classes": image_target(LlamaGenForCausalLM(LlamaGenConfig(**SIZES, num_classes=5)).eval()),
        "captions": image_target(LlamaGenForCausalLM(captions).eval()),
        "janus": image_target(tiny_janus()[0]),
        "emu3": image_target(tiny_emu3()[0]),
        "anole": image_target(tiny_anole()[0]),
        "lumina": image_target(tiny_lumina()[0]),
    }


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    config = T5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return {"tokenizer": tokenizer, "text_encoder": T5EncoderModel(config).eval()}


def words(name: str) -> Any:
    return {"janus": tiny_janus, "emu3": tiny_emu3, "anole": tiny_anole, "lumina": tiny_lumina}[name]()[1]


def test_a_caption_longer_than_the_text_encoder_reads_is_cut_and_said(
    targets: dict[str, Any], reader: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        (fits,) = image_requests(targets["captions"], "a small green star on a", **reader)
        assert not caplog.records
        (cut,) = image_requests(targets["captions"], "A small  green star on a large square", **reader)
    assert "reads at most 6 tokens" in caplog.text and "'large square'" in caplog.text
    assert torch.equal(cut.inputs["caption_features"], fits.inputs["caption_features"])


def test_parts_that_are_missing_are_named(targets: dict[str, Any], reader: dict[str, Any]) -> None:
    """Other refusals are rows of tests/bad_inputs."""
    rules = {"tokenizer": "the tokenizer of the prompts", "text_encoder": "the T5 encoder that the model"}
    for name in reader:
        with pytest.raises(InputError, match=f"^{name} must be {rules[name]}.*got None"):
            image_requests(targets["captions"], "blue", **{**reader, name: None})


WRONG_SIZES = [
    ("classes", 32, 64, r"64 x 64, .*trained.*\(32, 64\)"),
    ("classes", 128, None, r"\(128, 64\)"),
    ("janus", 64, 32, "64 x 64, the only size that Janus draws"),
    ("anole", None, 64, "32 x 32, the only size"),
    ("emu3", 9, 8, "multiples of 2"),
    ("emu3", 8, 4, "at least 6 wide"),
    ("emu3", 40, 40, "fewer than 256 tokens"),
    ("lumina", 48, 32, "multiples of 32"),
    ("lumina", 768, 800, "at most 768 x 768"),
    ("lumina", 32, 160, "at most 4 times the other"),
]


def test_sizes_that_a_model_was_not_made_for_are_refused(targets: dict[str, Any]) -> None:
    for name, height, width, message in WRONG_SIZES:
        with pytest.raises(InputError, match=message):
            image_requests(targets[name], class_labels=1, height=height, width=width)


@pytest.mark.parametrize("name", ["janus", "emu3", "anole", "lumina"])
def test_a_family_reads_its_own_tokens_and_negative_prompts_like_prompts(
    targets: dict[str, Any], name: str
) -> None:
    with pytest.raises(InputError, match="^tokenizer .*of the model"):
        image_requests(targets[name], "blue", height=None, tokenizer=tiny_tokenizer())
    side = {"emu3": 8, "lumina": 32}.get(name)
    settings: dict[str, Any] = {"height": side, "width": side, "tokenizer": words(name)}
    (request,) = image_requests(targets[name], "blue", negative_prompt="red", **settings)
    (other,) = image_requests(targets[name], "red", **settings)
    assert torch.equal(request.negative_inputs["input_ids"], other.inputs["input_ids"])
