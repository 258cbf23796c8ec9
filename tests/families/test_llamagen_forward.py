"""Converted weights give the logits of an independent forward, in one piece, in chunks, in trees, padded."""

import pytest
import torch

from mmspec.errors import InputError
from mmspec.families.llamagen.configuration import LlamaGenConfig
from mmspec.families.llamagen.modeling import (
    LlamaGenForCausalLM,
    caption_prompt,
    class_prompt,
    null_caption_prompt,
)
from mmspec.transformers_versions import CACHE
from tests.families.converted import convert_and_load
from tests.families.naive_llamagen import caption_prefix, class_prefix, naive_logits
from tests.families.official_layout import CAPTIONS, CLASSES, GRID, VOCABULARY, transformer_state

TOKENS = torch.randint(VOCABULARY, (GRID**2,), generator=torch.Generator().manual_seed(1))
FEATURES = torch.randn(2, 6, 12, generator=torch.Generator().manual_seed(2))
# logits of size 3 to 10 in float32 against float64
CLOSE = dict(rtol=1e-5, atol=3e-5)


def with_tokens(prompt: dict, tokens: torch.Tensor) -> dict:
    """A prompt and the same image tokens in every row."""
    ids = prompt["input_ids"]
    return {**prompt, "input_ids": torch.cat([ids, tokens.expand(len(ids), -1)], dim=1)}


@pytest.fixture(scope="module")
def class_state():
    return transformer_state(**CLASSES)


@pytest.fixture(scope="module")
def class_model(class_state, tmp_path_factory):
    return convert_and_load(tmp_path_factory.mktemp("c2i"), {"model": class_state})


@pytest.fixture(scope="module")
def caption_state():
    return transformer_state(**CAPTIONS)


@pytest.fixture(scope="module")
def caption_model(caption_state, tmp_path_factory):
    return convert_and_load(tmp_path_factory.mktemp("t2i"), {"module": caption_state})


@pytest.mark.parametrize("attention", ["sdpa", "eager"])
@torch.inference_mode()
def test_class_conditional_logits(class_model, class_state, attention):
    class_model.set_attn_implementation(attention)
    prompt = class_prompt(class_model.config, [3, None])
    logits = class_model(**with_tokens(prompt, TOKENS)).logits
    for row, label in enumerate((3, 5)):
        prefix = class_prefix(class_state, label)
        expected = naive_logits(class_state, prefix, TOKENS.tolist())
        torch.testing.assert_close(logits[row].double(), expected, **CLOSE)
    class_model.set_attn_implementation("sdpa")


@torch.inference_mode()
def test_padded_captions_are_read_by_a_mask_on_the_left(caption_model, caption_state):
    prompt = with_tokens(caption_prompt(caption_model.config, FEATURES), TOKENS)
    padded = [4, 0]
    mask = torch.ones_like(prompt["input_ids"])
    mask[0, :4] = 0
    logits = caption_model(**prompt, attention_mask=mask).logits
    for row in range(2):
        prefix = caption_prefix(caption_state, FEATURES[row])
        expected = naive_logits(caption_state, prefix, TOKENS.tolist(), padded[row])
        torch.testing.assert_close(logits[row, padded[row] :].double(), expected[padded[row] :], **CLOSE)


def test_generate_of_transformers_draws_padded_captions(caption_model, caption_state):
    lengths = (6, 2)
    mask = torch.tensor([[slot >= 6 - length for slot in range(6)] for length in lengths]).long()
    prompt = caption_prompt(caption_model.config, FEATURES)
    tokens = caption_model.generate(**prompt, attention_mask=mask, do_sample=False, max_new_tokens=GRID**2)
    for row, (features, length) in enumerate(zip(FEATURES, lengths, strict=True)):
        drawn = tokens[row, 6:].tolist()
        prefix = caption_prefix(caption_state, features)
        logits = naive_logits(caption_state, prefix, drawn[:-1], 6 - length)
        assert logits[5:].argmax(-1).tolist() == drawn and len(set(drawn)) > 3


def test_prompts_that_do_not_fit_are_refused(class_model, caption_model):
    classes, captions = class_model.config, caption_model.config
    for made, named in (
        (lambda: class_prompt(classes, [0, 5]), r"class_labels\[1\]"),
        (lambda: class_prompt(classes, [-1]), "0 to 4"),
        (lambda: class_prompt(classes, [True]), "0 to"),
        (lambda: class_prompt(captions, [0]), "conditioned on captions"),
        (lambda: caption_prompt(classes, FEATURES), "conditioned on classes"),
        (lambda: class_model(input_ids=TOKENS[None], caption_features=FEATURES), "conditioned on classes"),
        (lambda: null_caption_prompt(class_model), "conditioned on captions"),
        *(
            (lambda shape=shape: caption_prompt(captions, torch.zeros(shape)), "caption_features")
            for shape in ((1, 7, 12), (1, 6, 11), (6, 12), (1, 0, 12))
        ),
    ):
        with pytest.raises(InputError, match=named):
            made()


def test_cached_keys_of_condition_slots_are_exactly_zero():
    config = LlamaGenConfig(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, vocab_size=16)
    model = LlamaGenForCausalLM(config).eval().to(torch.bfloat16)
    output = model(**class_prompt(config, [3]), use_cache=True)
    for layer in getattr(output, CACHE).layers:
        assert not layer.keys.any() and layer.values.any()
