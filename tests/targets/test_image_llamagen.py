"""LlamaGen draws what its paper's loop draws: any drafter, batch, guidance and length of caption."""

import pytest
import torch
from transformers import T5Config, T5EncoderModel

from mmspec.pipelines.image_prompts import image_requests
from mmspec.targets.llamagen import LlamaGenTarget
from tests.models.converted import convert_and_load
from tests.models.naive_llamagen import caption_prefix, class_prefix, naive_logits
from tests.models.official_layout import (
    CAPTIONS,
    CLASSES,
    GRID,
    HEADS,
    VOCABULARY,
    transformer_state,
)
from tests.targets.image_loop import DRAFTERS, accelerator, draw, naive_picture
from tests.tiny_models import tiny_tokenizer

SEED = 9
LABELS = (0, 4, 2)
NULL = 5
TEXTS = ["a red circle", "blue", "the small green star on a large square"]  # the last one is cut


def naive(state, grid, condition, negative, scale, pads):
    """The greedy picture of a condition [n, D], with the null condition as the negative one."""

    def logits(prefix, padded):
        return lambda output: naive_logits(state, HEADS, GRID, prefix, output, padded)[-1]

    other = logits(negative, pads) if scale != 1 else None
    return naive_picture(grid, logits(condition, pads), other, scale)


@pytest.fixture(scope="module")
def classes(tmp_path_factory):
    state = transformer_state(seed=SEED, **CLASSES)
    return state, LlamaGenTarget(convert_and_load(tmp_path_factory.mktemp("c2i"), state))


@pytest.fixture(scope="module")
def captions(tmp_path_factory):
    state = transformer_state(seed=SEED, **CAPTIONS)
    return state, LlamaGenTarget(convert_and_load(tmp_path_factory.mktemp("t2i"), state))


@pytest.fixture(scope="module")
def reader():
    """A T5 encoder as wide as the tiny model's captions, and its tokenizer."""
    tokenizer = tiny_tokenizer()
    config = T5Config(
        vocab_size=len(tokenizer), d_model=12, d_kv=4, d_ff=16, num_layers=1, num_heads=2, is_decoder=False
    )
    torch.manual_seed(0)
    return tokenizer, T5EncoderModel(config).eval().requires_grad_(False)


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_classes(classes, scale):
    state, target = classes
    null = class_prefix(state, NULL)
    answers = [naive(state, target.grid, class_prefix(state, label), null, scale, 0) for label in LABELS]
    requests = image_requests(target, class_labels=LABELS, guided=scale != 1)
    for name in DRAFTERS:
        made = accelerator(name, requests, answers, VOCABULARY)
        assert draw(target, made, requests, scale)[0] == answers, name
        assert draw(target, made, requests[:1], scale)[0] == answers[:1], name


@pytest.mark.parametrize("scale", [1.0, 3.0])
def test_captions(captions, reader, scale):
    state, target = captions
    tokenizer, encoder = reader
    answers = []
    for text in TEXTS:
        ids = tokenizer(text, truncation=True, max_length=6, return_tensors="pt").input_ids
        pads = 6 - ids.shape[1]
        features = torch.zeros(6, 12)
        features[pads:] = encoder(ids).last_hidden_state[0]
        null = caption_prefix(state, state["cls_embedding.uncond_embedding"])
        answers.append(naive(state, target.grid, caption_prefix(state, features), null, scale, pads))
    requests = image_requests(target, TEXTS, tokenizer=tokenizer, text_encoder=encoder)
    assert len({row["input_ids"].shape[1] for row in (r.inputs for r in requests)}) == 3
    for name in ("none", "copy"):
        assert (
            draw(target, accelerator(name, requests, answers, VOCABULARY), requests, scale)[0] == answers
        ), name
    for request, answer in zip(requests, answers, strict=True):
        made = accelerator("oracle 30 %", [request], [answer], VOCABULARY)
        assert draw(target, made, [request], scale)[0] == [answer]
