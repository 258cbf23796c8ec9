"""Prompts, labels and sizes become requests; what a model was not made for is refused before any work."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import VQModel
from transformers import ChameleonForConditionalGeneration, T5Config, T5EncoderModel

from mmspec.errors import CheckpointError, InputError
from mmspec.families.chameleon.target import AnoleTarget, LuminaTarget, size_token
from mmspec.families.images import image_target
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import LlamaGenForCausalLM
from mmspec.pipelines.image_prompts import image_requests
from tests.tiny_models import CODES, tiny_anole, tiny_emu3, tiny_janus, tiny_lumina, tiny_tokenizer

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
        "lumina": image_target(tiny_lumina()[0], family="lumina_mgpt"),
    }


@pytest.fixture(scope="module")
def reader() -> dict[str, Any]:
    tokenizer = tiny_tokenizer()
    config = T5Config(vocab_size=len(tokenizer), d_model=WIDTH, d_kv=4, d_ff=16, num_layers=1, num_heads=2)
    return {"tokenizer": tokenizer, "text_encoder": T5EncoderModel(config).eval()}


def words(name: str) -> Any:
    return {"janus": tiny_janus, "emu3": tiny_emu3, "anole": tiny_anole, "lumina": tiny_lumina}[name]()[1]


def test_images_of_one_prompt_stand_side_by_side(targets: dict[str, Any]) -> None:
    requests = image_requests(targets["classes"], class_labels=[3, None], num_images_per_prompt=2)
    assert [request.prompt_tokens for request in requests] == [[8 + 3], [8 + 3], [8 + 5], [8 + 5]]
    assert all(request.negative_inputs["input_ids"].tolist() == [[8 + 5]] for request in requests)
    assert all(request.layout == targets["classes"].grid for request in requests)
    assert image_requests(targets["classes"], class_labels=0, guided=False)[0].negative_inputs is None


def test_a_caption_longer_than_the_text_encoder_reads_is_cut_and_said(
    targets: dict[str, Any], reader: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        (fits,) = image_requests(targets["captions"], "a small green star on a", **reader)
        assert not caplog.records
        (cut,) = image_requests(targets["captions"], "A small  green star on a large square", **reader)
    assert "reads 6 tokens" in caplog.text and "'large square'" in caplog.text
    assert torch.equal(cut.inputs["caption_features"], fits.inputs["caption_features"])


def test_parts_that_are_missing_are_named(targets: dict[str, Any], reader: dict[str, Any]) -> None:
    """Other refusals are rows of tests/bad_inputs."""
    for name in reader:
        with pytest.raises(InputError, match=f"{name}: got None"):
            image_requests(targets["captions"], "blue", **{**reader, name: None})


WRONG_SIZES = [
    ("classes", 32, 64, r"\(32, 64\); 64 x 64, which this checkpoint was trained for"),
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


def test_sizes_that_a_model_was_made_for(targets: dict[str, Any]) -> None:
    for name, height, width, cells in (
        ("emu3", 24, 20, (12, 10)),
        ("emu3", 10, 6, (5, 3)),
        ("lumina", 64, 96, (8, 12)),
        ("janus", 64, 64, (4, 4)),
    ):
        (request,) = image_requests(targets[name], "blue", height=height, width=width, tokenizer=words(name))
        assert (request.layout.rows, request.layout.columns) == cells
        assert request.inputs["forced"].tolist() == [list(request.layout.forced)]


@pytest.mark.parametrize("name", ["janus", "emu3", "anole", "lumina"])
def test_a_family_reads_its_own_tokens_and_negative_prompts_like_prompts(
    targets: dict[str, Any], name: str
) -> None:
    with pytest.raises(InputError, match="tokenizer: got .*that of the model"):
        image_requests(targets[name], "blue", height=None, tokenizer=tiny_tokenizer())
    side = {"emu3": 8, "lumina": 32}.get(name)
    settings: dict[str, Any] = {"height": side, "width": side, "tokenizer": words(name)}
    (request,) = image_requests(targets[name], "blue", negative_prompt="red", **settings)
    (other,) = image_requests(targets[name], "red", **settings)
    assert torch.equal(request.negative_inputs["input_ids"], other.inputs["input_ids"])


def test_size_tokens_of_lumina_are_those_of_its_tokenizer() -> None:
    # <reservedNNNNN> has id NNNNN + 4; 8828 twice stands before an image of 768 x 768
    assert size_token(768) == f"<reserved{8828 - 4:05}>" and size_token(512) == f"<reserved{8820 - 4:05}>"


def test_vocabularies_and_image_tokenizers_that_do_not_fit_are_refused(targets: dict[str, Any]) -> None:
    for word, message in (
        ("<|extra_201|>", r"vocabulary_map: got 'no <\|extra_201\|>'"),
        ("<|visual token 000003|>", "vocabulary_map: got '23 image tokens'"),
    ):
        model, _ = tiny_emu3()
        del model.config.vocabulary_map[word]
        with pytest.raises(CheckpointError, match=message):
            image_target(model)
    blocks = {"down_block_types": ("DownEncoderBlock2D",) * 4, "up_block_types": ("UpDecoderBlock2D",) * 4}
    other = VQModel(num_vq_embeddings=CODES + 8, block_out_channels=(32, 32, 32, 32), **blocks)
    vq = VQModel(num_vq_embeddings=CODES)
    for name, given, message in (
        ("janus", vq, "vq: got 'VQModel'; None"),
        ("emu3", vq, "vq: got 'VQModel'; None"),
        ("anole", vq, "vq: got '1 pixels per token'; 8"),
        ("anole", other, f"vq: got '{CODES + 8} entries'; a codebook of {CODES}"),
    ):
        with pytest.raises(InputError, match=message):
            image_target(targets[name].model, given)


def test_lumina_is_recognised_by_its_class_and_its_size_by_its_name(tmp_path: Path) -> None:
    tiny_lumina()[0].save_pretrained(tmp_path / "stock")
    stock = image_target(ChameleonForConditionalGeneration.from_pretrained(tmp_path / "stock"))
    assert type(stock) is AnoleTarget and stock.codebook is not None
    tiny_lumina()[0].save_pretrained(tmp_path / "Lumina-mGPT-7B-1024")
    named = image_target(ChameleonForConditionalGeneration.from_pretrained(tmp_path / "Lumina-mGPT-7B-1024"))
    assert isinstance(named, LuminaTarget) and named.image_size == (1024, 1024)
    folder = tmp_path / "7B-512"
    tiny_lumina()[0].save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    config["architectures"] = ["ChameleonXLLMXForConditionalGeneration"]
    (folder / "config.json").write_text(json.dumps(config))
    target = image_target(ChameleonForConditionalGeneration.from_pretrained(folder))
    assert isinstance(target, LuminaTarget)
    assert target.image_size == (512, 512) and target.codebook is None
    assert target.grid.row_end == CODES and target.grid.ending == (CODES + 1,)
