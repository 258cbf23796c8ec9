"""Calls without settings use the defaults that the authors of a model publish."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, PreTrainedModel

import mmspec
from mmspec.core.sampling import LEAST_TEMPERATURE, Sampler
from mmspec.errors import InputError, UnsupportedModelError
from mmspec.pipelines import VisionLanguagePipeline
from tests.methods import eagle_checks
from tests.pipelines.byte_level import TEMPLATE
from tests.pipelines.published_configs import EVERY, JANUS, TEXT, VISION_LANGUAGE, Published
from tests.tiny_models import VISION_LANGUAGE_FAMILIES, tiny_janus, tiny_llama, tiny_tokenizer
from tests.tiny_models.any_class import tiny_of_class

PROMPT = "what is there ? a red circle and a red circle and a"
POSITIONS = 28
TOKENIZER = tiny_tokenizer()
TOKENIZER.chat_template = TEMPLATE
BUILT = {
    "Qwen2_5_VLForConditionalGeneration": lambda: VISION_LANGUAGE_FAMILIES["qwen2_5_vl"](),
    "Qwen2VLForConditionalGeneration": lambda: VISION_LANGUAGE_FAMILIES["qwen2_vl"](),
    "JanusForConditionalGeneration": tiny_janus,
}
NOT_TINY = {"Gemma3nForConditionalGeneration", "PerceptionLMForConditionalGeneration"}
CLASSES = sorted({one.model for one in EVERY if one.model is not None} - NOT_TINY)


@functools.cache
def pipes() -> tuple[Any, Any, Any]:
    """Plain decoding, `copy` and a head, of one model with few positions."""
    model = tiny_llama(vocab=128)
    model.config.max_position_embeddings = POSITIONS
    made: list[Any] = [VisionLanguagePipeline(model, TOKENIZER, name) for name in ("none", "copy")]
    head = eagle_checks.head_for(made[0].target)
    return made[0], made[1], VisionLanguagePipeline(model, TOKENIZER, "eagle", drafter=head)


def answer(pipe: Any, **settings: Any) -> list[int]:
    return pipe(PROMPT, apply_chat_template=False, seed=1, **settings).tokens[0]


def is_greedy(values: dict[str, Any]) -> bool:
    return not values.get("do_sample") or values.get("temperature", 1.0) < LEAST_TEMPERATURE


def generated(model: PreTrainedModel, values: dict[str, Any], count: int, tokenizer: Any = TOKENIZER) -> Any:
    """Return the greedy output of `generate` under the penalties of the config."""
    ids = tokenizer(PROMPT, return_tensors="pt").input_ids
    config = GenerationConfig(**{**values, "do_sample": False, "max_length": None, "max_new_tokens": count})
    config.temperature = config.top_p = config.top_k = config.guidance_scale = None
    config.pad_token_id = 0
    with torch.no_grad():
        output: Any = model.generate(ids, generation_config=config)
    return output[0, ids.shape[1] :].tolist()


@pytest.mark.parametrize("published", EVERY, ids=lambda one: one.family)
@pytest.mark.every(6)
def test_a_published_config_decodes_as_plain_decoding_and_generate_do(published: Published) -> None:
    """On one Llama: with `copy` and with a head; to the end of its context."""
    plain, copied, headed = pipes()
    values = {**published.values, "guidance_scale": None}
    plain.model.generation_config = GenerationConfig(**values)
    expected = answer(plain)
    ends = values.get("eos_token_id", [])
    if not set(ends if isinstance(ends, list) else [ends]) & set(expected):
        assert len(expected) == POSITIONS - len(TOKENIZER(PROMPT).input_ids)
    assert answer(copied) == expected and answer(headed) == expected
    if is_greedy(values):
        assert expected == generated(plain.model, values, len(expected))


@pytest.mark.parametrize("name", CLASSES)
@pytest.mark.every(6)
def test_a_class_answers_by_the_config_that_is_published_of_it(name: str) -> None:
    model, tokenizer = (*BUILT[name](),)[:2] if name in BUILT else (tiny_of_class(name), TOKENIZER)
    tokenizer = getattr(tokenizer, "tokenizer", tokenizer)
    for published in (one for one in EVERY if one.model == name):
        model.generation_config = GenerationConfig(**published.values)
        try:
            copied, plain = (VisionLanguagePipeline(model, tokenizer, each) for each in ("copy", "none"))
        except UnsupportedModelError:
            assert name == "Llama4ForConditionalGeneration", "layers of chunks"
            continue
        expected = answer(plain, max_new_tokens=12)
        assert answer(copied, max_new_tokens=12) == expected
        if is_greedy(published.values):
            assert expected == generated(model, published.values, len(expected), tokenizer)


def test_there_are_thirty_published_configs_of_different_origin() -> None:
    assert len(EVERY) >= 30 and len({one.source for one in EVERY}) == len(EVERY)
    assert len(VISION_LANGUAGE) > 10 and len(TEXT) > 15


def test_guidance_of_a_model_that_draws_is_not_that_of_its_answers() -> None:
    model, tokenizer, *_ = tiny_janus()
    pipe: Any = VisionLanguagePipeline(model, tokenizer, "copy")
    model.generation_config = GenerationConfig()
    expected = answer(pipe, max_new_tokens=8)
    model.generation_config = GenerationConfig(**JANUS.values)
    assert answer(pipe, max_new_tokens=8) == expected


@pytest.mark.parametrize("temperature", [1e-6, 1e-40, 5e-324])
def test_tiny_temperatures_are_greedy_wherever_they_come_from(temperature: float) -> None:
    pipe = pipes()[1]
    model = pipe.model
    how: dict[str, Any] = {"repetition_penalty": 1.05, "top_p": 1e-10, "max_new_tokens": 12}
    model.generation_config = GenerationConfig()
    expected = answer(pipe, do_sample=False, **how)
    assert expected == generated(model, {"repetition_penalty": 1.05}, 12)
    assert answer(pipe, temperature=temperature, **how) == expected
    config = GenerationConfig(do_sample=True, temperature=temperature, **how)
    assert answer(pipe, generation_config=config) == expected
    ids = TOKENIZER(PROMPT, return_tensors="pt").input_ids
    for order in ({}, {"typical_p": 0.9}):  # transformers' last warper: then all are called in their order
        output = model.generate(
            ids, generation_config=config, pad_token_id=0, custom_generate=mmspec.accelerate("copy"), **order
        )
        assert output[0, ids.shape[1] :].tolist() == expected
    model.generation_config = config
    assert answer(pipe) == expected
    rows = pipe([PROMPT] * 2, apply_chat_template=False, seed=1, temperature=[temperature, 0.0], **how)
    assert rows.tokens == [expected] * 2
    assert Sampler([temperature, 0.0]).greedy and not Sampler(LEAST_TEMPERATURE).greedy


def test_the_configs_own_number_of_tokens_is_cut_to_the_context_and_the_callers_is_not() -> None:
    pipe = pipes()[1]
    left = POSITIONS - len(TOKENIZER(PROMPT).input_ids)
    for most in (left + 1, 131072, 10**12):
        pipe.model.generation_config = own = GenerationConfig(max_new_tokens=most)
        assert len(answer(pipe)) == left
        assert len(answer(pipe, generation_config=GenerationConfig(max_new_tokens=most))) == left, "a copy"
        with pytest.raises(InputError, match="max_new_tokens"):
            answer(pipe, max_new_tokens=most)
        own.max_new_tokens = 4
        with pytest.raises(InputError, match="max_new_tokens"):
            answer(pipe, generation_config=GenerationConfig(max_new_tokens=most))
    assert len(answer(pipe)) == 4
