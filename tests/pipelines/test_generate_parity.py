"""Keywords and config fields have the same effect in pipelines as in `generate`, or are refused by name."""

from __future__ import annotations

import copy
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    GenerationConfig,
    PreTrainedModel,
    SynthIDTextWatermarkingConfig,
    WatermarkingConfig,
)

from mmspec.call_fields import CUTOFFS, SHAPING
from mmspec.errors import InputError, UnknownArgumentError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.pipelines.generation_fields import (
    CHANGE_NO_TOKEN,
    REFUSED,
    REFUSED_OF_CALLERS,
    installed_fields,
    unserved,
)
from mmspec.pipelines.settings import GenerationSettings
from tests.bad_inputs.refusals import no_forward
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import tiny_llama

NEW, LONG = 20, 40
TOKENIZER = byte_level_tokenizer()
PROMPT = "the red the red the red"
SERVED = {field.name for field in fields(GenerationSettings)}


@pytest.fixture
def model() -> PreTrainedModel:
    return tiny_llama(vocab=300).double()


@pytest.fixture
def pipe(model: PreTrainedModel) -> VisionLanguagePipeline:
    """A pipeline whose drafts come from the model itself, so that only settings limit their acceptance."""
    return VisionLanguagePipeline(model, TOKENIZER, "draft_model", drafter=model, num_draft_tokens=6)


def generated(model: PreTrainedModel, **keywords: Any) -> list[int]:
    ids = TOKENIZER(PROMPT, return_tensors="pt").input_ids
    output: Tensor = model.generate(ids, pad_token_id=0, **keywords)  # type: ignore[assignment]
    return list(output[0, ids.shape[1] :].tolist())


def emitted(pipe: Any, **keywords: Any) -> list[int]:
    return list(pipe(PROMPT, apply_chat_template=False, **keywords).tokens[0])


def fields_that_act(tokens: list[int]) -> dict[str, dict[str, Any]]:
    """A value for each field that changes these greedy tokens, with what it needs beside it."""
    return {
        "suppress_tokens": {"suppress_tokens": [tokens[1]]},
        "begin_suppress_tokens": {"begin_suppress_tokens": [tokens[0]]},
        "sequence_bias": {"sequence_bias": [[[tokens[1]], -50.0]]},
        "forced_eos_token_id": {"forced_eos_token_id": 7},
        "exponential_decay_length_penalty": {
            "exponential_decay_length_penalty": (2, 3.0),
            "eos_token_id": 9,
        },
        "watermarking_config": {"watermarking_config": WatermarkingConfig(bias=9.0)},
        "a watermark with a state": {"watermarking_config": SynthIDTextWatermarkingConfig(3, [654, 400])},
        "encoder_repetition_penalty": {"encoder_repetition_penalty": 1.7},
        "encoder_no_repeat_ngram_size": {"encoder_no_repeat_ngram_size": 1, "sequence_bias": [[[228], 50.0]]},
        "min_length": {"min_length": 30, "eos_token_id": tokens[2]},
        "max_length": {"max_length": 30, "max_new_tokens": None},
        "bad_words_ids": {"bad_words_ids": [[tokens[3]]]},
        "repetition_penalty": {"repetition_penalty": 0.5},
    }


def test_fields_act_in_the_models_own_config_in_a_given_one_and_as_keywords(
    pipe: Any, model: PreTrainedModel
) -> None:
    """Each field is tested in one of the three places, since the same code reads all fields."""
    free = generated(model, max_new_tokens=NEW)
    own = model.generation_config
    for index, (name, values) in enumerate(fields_that_act(free).items()):
        values = {"max_new_tokens": NEW, **values}
        wanted, config = generated(model, **values), GenerationConfig(**values)
        assert wanted != free, name
        model.generation_config = config if index % 3 == 2 else own
        keywords = (values, {"generation_config": config}, {})[index % 3]
        assert emitted(pipe, **keywords) == wanted, name
        model.generation_config = own


def test_the_nearest_place_wins_and_a_given_config_is_completed_by_the_models(
    pipe: Any, model: PreTrainedModel
) -> None:
    free = generated(model, max_new_tokens=NEW)
    model.generation_config.suppress_tokens = [free[1]]
    model.generation_config.max_new_tokens = NEW
    given = GenerationConfig(repetition_penalty=1.3)
    wanted = generated(model, generation_config=copy.deepcopy(given))
    assert emitted(pipe, generation_config=given) == wanted
    other = generated(model, suppress_tokens=[free[0]])
    assert emitted(pipe, suppress_tokens=[free[0]]) == other != wanted
    assert emitted(pipe, generation_config=GenerationConfig(suppress_tokens=[free[0]])) == other


def test_lengths_count_the_prompt_and_lose_to_new_tokens_of_the_same_place(
    pipe: Any, model: PreTrainedModel
) -> None:
    prompt = len(TOKENIZER(PROMPT).input_ids)
    assert len(emitted(pipe, max_length=prompt + 7)) == 7
    assert len(emitted(pipe, max_length=prompt + 7, max_new_tokens=9)) == 9
    assert (
        len(emitted(pipe, generation_config=GenerationConfig(max_length=prompt + 7, max_new_tokens=9))) == 9
    )
    model.generation_config.max_new_tokens = 11
    copied = copy.deepcopy(model.generation_config)
    copied.max_length = prompt + 7
    assert [len(emitted(pipe)), len(emitted(pipe, generation_config=copied))] == [11, 7]
    assert len(emitted(pipe, generation_config=copied, max_new_tokens=9)) == 9
    batch = pipe([PROMPT, PROMPT[:9]], apply_chat_template=False, max_length=prompt + 7)
    assert list(map(len, batch.tokens)) == [7, 7]  # as in a padded batch


def test_draws_are_from_the_distribution_of_generate(pipe: Any, model: PreTrainedModel) -> None:
    def keep(model: Any, input_ids: Tensor, logits_processor: Any, **others: Any) -> Tensor:
        scores.append(logits_processor(input_ids, model(input_ids).logits[:, -1]))
        return input_ids

    for truncation in (
        {"typical_p": 0.3},
        {"epsilon_cutoff": 0.02},
        {"eta_cutoff": 0.1},
        {"top_h": 0.9, "temperature": 3.0},
        {"watermarking_config": WatermarkingConfig(bias=4.0), "top_k": 7},
        {"typical_p": 0.8, "suppress_tokens": [3], "temperature": 2.5, "top_p": 0.9, "min_p": 0.01},
    ):
        scores: list[Tensor] = []
        how: dict[str, Any] = {"do_sample": True, "max_new_tokens": NEW, **truncation}
        generated(model, **how, custom_generate=keep)
        pipe.set_accelerator("copy")
        call = pipe._prepare_request(PROMPT, {**how, "apply_chat_template": False, "seed": 1})[0]
        prompts = next(call.rounds())
        assert (scores[0][0].softmax(-1) > 0.0).sum() > 1
        assert torch.allclose(prompts.scores.p[0, 0], scores[0][0].softmax(-1), atol=1e-12)
        assert emitted(pipe, **how, seed=3) == emitted(pipe.set_accelerator("none"), **how, seed=3)


def test_every_field_of_the_installed_transformers_is_decided_about() -> None:
    assert unserved(frozenset(SERVED)) == {}, "a new field: serve it, or add it to a table"
    tables = [SERVED, CHANGE_NO_TOKEN, set(REFUSED), set(REFUSED_OF_CALLERS)]
    assert sum(map(len, tables)) == len(set().union(*tables))
    assert set(SHAPING) | set(CUTOFFS) <= SERVED


def test_what_is_not_served_is_refused_by_name_wherever_it_is_set(
    pipe: Any, model: PreTrainedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, tables = model.generation_config, {**REFUSED, **REFUSED_OF_CALLERS}
    names = [*tables, "a_field_of_tomorrow"]
    known = installed_fields() | set(names)
    monkeypatch.setattr("mmspec.pipelines.generation_fields.installed_fields", lambda: known)
    unserved.cache_clear()
    for name in names:
        value: Any = "quantized" if name == "cache_implementation" else 2
        config = copy.deepcopy(own)
        setattr(config, name, value)
        model.generation_config = own
        with no_forward():
            with pytest.raises(InputError, match=rf"^{name} must be "):
                emitted(pipe, **{name: value})
            with pytest.raises(InputError, match=rf"^generation_config\.{name} must be "):
                emitted(pipe, generation_config=config)
        model.generation_config = config
        if name in REFUSED_OF_CALLERS:  # a checkpoint may contain it; it does not affect tokens in mmspec
            assert len(emitted(pipe, max_new_tokens=3)) == 3
        else:
            with pytest.raises(InputError, match=rf"^generation_config\.{name} must be "), no_forward():
                emitted(pipe)
        harmless, _ = tables.get(name, ((), ""))
        for value in (*harmless[:1], False):  # an argument of the call takes precedence over the checkpoint
            assert len(emitted(pipe, max_new_tokens=3, **{name: value})) == 3
    unserved.cache_clear()


def test_what_changes_no_token_and_what_checkpoints_carry_is_passed_over(
    pipe: Any, model: PreTrainedModel
) -> None:
    free = generated(model, max_new_tokens=NEW)
    model.generation_config.chat_format = "chatml"  # Qwen-VL's
    for name in sorted(CHANGE_NO_TOKEN):
        setattr(model.generation_config, name, "anything")
    assert emitted(pipe, max_new_tokens=NEW) == free
    given = copy.deepcopy(model.generation_config)
    assert emitted(pipe, max_new_tokens=NEW, generation_config=given, use_cache=False) == free
    given.chat_frmat = "chatml"
    with pytest.raises(UnknownArgumentError, match="chat_frmat"):
        emitted(pipe, generation_config=given)


def test_sampling_has_the_defaults_of_transformers(pipe: Any, model: PreTrainedModel) -> None:
    def said(**how: Any) -> list[int]:
        return emitted(pipe, max_new_tokens=NEW, seed=3, **how)

    free = generated(model, max_new_tokens=NEW)
    assert said(do_sample=True) == said(do_sample=True, top_k=50, temperature=1.0) == said(temperature=1.0)
    assert said(temperature=3.0, top_k=0) != said(temperature=3.0)
    assert said(temperature=0) == said(do_sample=False, temperature=0.7) == free
    assert said(do_sample=True, top_k=1) == free
    settings = ({}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 5, "repetition_penalty": 1.2})
    drafted = [said(temperature=1.2, **how) for how in settings]
    pipe.set_accelerator("none")
    assert [said(temperature=1.2, **how) for how in settings] == drafted


def test_guidance_mixes_two_prompts_as_generate_does(pipe: Any, model: PreTrainedModel) -> None:
    negative = "a blue"
    ids = TOKENIZER(negative, return_tensors="pt").input_ids
    wanted = generated(model, guidance_scale=2.5, negative_prompt_ids=ids, max_new_tokens=NEW)
    rows = [(PROMPT, negative), ("red", "a much longer negative prompt")]
    call = {"guidance_scale": 2.5, "max_new_tokens": NEW, "apply_chat_template": False}
    batch = pipe([row[0] for row in rows], negative_prompt=[row[1] for row in rows], **call)
    assert batch.tokens == [pipe(text, negative_prompt=other, **call).tokens[0] for text, other in rows]
    assert batch.tokens[0] == wanted != emitted(pipe, max_new_tokens=NEW)
    assert emitted(pipe, negative_prompt=negative, max_new_tokens=NEW) == emitted(pipe, max_new_tokens=NEW)


@pytest.mark.parametrize("name", ["copy", "none"])
def test_a_stop_string_may_begin_in_the_prompt_unless_that_is_turned_off(
    name: str, pipe: Any, model: PreTrainedModel
) -> None:
    """In one row and in two, of different lengths; beside a criterion that knows the batch as well."""
    pipe = VisionLanguagePipeline(model, TOKENIZER, name)
    free = emitted(pipe, max_new_tokens=NEW)
    over = PROMPT[-3:] + TOKENIZER.decode(free[:1])
    texts = [TOKENIZER.decode([token]) for token in free]
    place = next(i for i in range(2, NEW) if texts[i].strip().isalnum() and texts[i] not in texts[:i])
    how: dict[str, Any] = {"max_new_tokens": NEW}
    assert emitted(pipe, **how, stop_strings=over) == free[:1]
    assert emitted(pipe, **how, stop_strings=over, stops_in_prompt=False) == free
    both = {"stop_strings": [over, texts[place]], **how}
    assert emitted(pipe, **both) == free[:1]
    assert emitted(pipe, **both, stops_in_prompt=False) == free[: place + 1]
    rows = [PROMPT, "and " + PROMPT]
    alone = [pipe(row, apply_chat_template=False, **how).tokens[0] for row in rows]
    given = {"stop_strings": over, "stops_in_prompt": False, "apply_chat_template": False}
    assert pipe(rows, **how, **given).tokens == alone
    together = pipe(rows, **how, **given, stopping_criteria=[lambda ids, scores, **_: False])
    assert together.tokens == alone
    with pytest.raises(InputError, match="stops_in_prompt"):
        emitted(pipe, **how, stop_strings=over, stops_in_prompt=0)
