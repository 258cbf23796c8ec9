"""LlamaGen through the speculative loop: the greedy tokens of a naive loop, whatever the drafter."""

import pytest
import torch

from mmspec.accelerators import build_accelerator
from mmspec.decoding.canvas import Stopping
from mmspec.models.llamagen import caption_prompt, class_prompt
from mmspec.targets import CausalTarget
from mmspec.targets.llamagen import LlamaGenTarget
from tests.models.converted import convert_and_load
from tests.models.naive_llamagen import caption_prefix, class_prefix, naive_logits
from tests.models.official_layout import CAPTIONS, CLASSES, GRID, HEADS, VOCABULARY, transformer_state
from tests.targets.loop import decode, generate, oracle

LABELS = (0, 4, 5)
FEATURES = torch.randn(3, 6, 12, generator=torch.Generator().manual_seed(2))
TEXT_LENGTHS = (6, 2, 1)
SEED = 9  # of 14 tried: greedy rows of 6 to 14 different tokens, best and second at least 0.019 apart


def accelerators(inputs, references):
    return [build_accelerator("copy", min_match=1), oracle(inputs, references, 4, VOCABULARY, 0.3)]


def plain(target, inputs):
    return decode(target, build_accelerator("none"), inputs, Stopping(GRID**2)).outputs


def is_greedy(state, prefix, tokens, padded=0):
    """Whether every token is the likeliest after those before it, by the independent forward."""
    logits = naive_logits(state, HEADS, GRID, prefix, tokens[:-1], padded)
    return logits[len(prefix) - 1 :].argmax(-1).tolist() == tokens


@pytest.fixture(scope="module")
def class_case(tmp_path_factory):
    state = transformer_state(seed=SEED, **CLASSES)
    model = convert_and_load(tmp_path_factory.mktemp("c2i"), state)
    inputs = [class_prompt(model.config, [label if label < 5 else None]) for label in LABELS]
    greedy = plain(CausalTarget(model), inputs)
    for row, label in zip(greedy, LABELS, strict=True):
        assert len(set(row)) > 3 and is_greedy(state, class_prefix(state, label), row)
    return model, greedy


@pytest.fixture(scope="module")
def caption_case(tmp_path_factory):
    state = transformer_state(seed=SEED, **CAPTIONS)
    model = convert_and_load(tmp_path_factory.mktemp("t2i"), state)
    greedy = plain(LlamaGenTarget(model), caption_inputs(model))
    for row, features, length in zip(greedy, FEATURES, TEXT_LENGTHS, strict=True):
        assert is_greedy(state, caption_prefix(state, features), row, padded=6 - length)
    return model, greedy


def caption_inputs(model):
    return [
        caption_prompt(model.config, row[None, 6 - length :])
        for row, length in zip(FEATURES, TEXT_LENGTHS, strict=True)
    ]


def test_class_conditional_images(class_case):
    model, greedy = class_case
    inputs = [class_prompt(model.config, [label if label < 5 else None]) for label in LABELS]
    for accelerator in accelerators(inputs, greedy):
        run = decode(CausalTarget(model), accelerator, inputs, Stopping(GRID**2))
        assert run.outputs == greedy, accelerator


def test_captions_of_several_lengths(caption_case):
    model, greedy = caption_case
    inputs = caption_inputs(model)
    for accelerator in accelerators(inputs, greedy):
        run = decode(LlamaGenTarget(model), accelerator, inputs, Stopping(GRID**2))
        assert run.outputs == greedy, accelerator


def test_generate_of_transformers_draws_the_same(class_case, caption_case):
    model, greedy = class_case
    assert generate(model, class_prompt(model.config, [0]), GRID**2) == greedy[0]
    model, greedy = caption_case
    ids = caption_prompt(model.config, FEATURES)
    mask = torch.tensor([[slot >= 6 - length for slot in range(6)] for length in TEXT_LENGTHS]).long()
    tokens = model.generate(**ids, attention_mask=mask, do_sample=False, max_new_tokens=GRID**2)
    assert tokens[:, 6:].tolist() == greedy
