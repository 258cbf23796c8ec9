"""A keyword of transformers does in the pipeline what it does in `model.generate`, accelerated or not."""

from __future__ import annotations

import copy
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, StoppingCriteria, StoppingCriteriaList

from mmspec.pipelines import MMSpecPipeline, VisionLanguagePipeline
from tests.tiny_models import tiny_image, tiny_llama

PROMPT = "the red thé red the red"
NEW = 40


class AfterEight(StoppingCriteria):
    """Stops at the first multiple of eight after twenty tokens of prompt and output."""

    def __call__(self, input_ids: torch.Tensor, scores: Any, **kwargs: Any) -> torch.Tensor:
        length = input_ids.shape[1]
        return torch.full((len(input_ids),), length > 20 and length % 8 == 0, dtype=torch.bool)


@pytest.fixture(scope="module")
def pipe(checkpoints: Path) -> Any:
    """Drafts of the model itself, which are accepted as far as a setting lets them."""
    draft = {"drafter": tiny_llama(vocab=300), "num_draft_tokens": 6}
    return MMSpecPipeline.from_pretrained(checkpoints / "bytes", accelerator="draft_model", **draft)


def expected(pipe: Any, **keywords: Any) -> list[int]:
    """Output of `generate` alone."""
    ids = pipe.tokenizer(PROMPT, return_tensors="pt").input_ids
    if "stop_strings" in keywords:
        keywords["tokenizer"] = pipe.tokenizer
    output = pipe.model.generate(ids, do_sample=False, **{"max_new_tokens": NEW, **keywords})
    return list(output[0, ids.shape[1] :].tolist())


def emitted(pipe: Any, **keywords: Any) -> list[int]:
    return list(pipe(PROMPT, apply_chat_template=False, **{"max_new_tokens": NEW, **keywords}).tokens[0])


def free(pipe: Any) -> list[int]:
    return expected(pipe)


def test_length_and_end_tokens_equal_generate(pipe: Any) -> None:
    tokens = free(pipe)
    assert emitted(pipe) == tokens
    for index in (0, 1, 7, 20, NEW - 1):
        for end in (tokens[index], [tokens[index], tokens[min(index + 3, NEW - 1)]]):
            assert emitted(pipe, eos_token_id=end) == expected(pipe, eos_token_id=end)
    for length in (1, 2, 7, 23):
        assert emitted(pipe, max_new_tokens=length) == tokens[:length]


def test_stop_strings_equal_generate(pipe: Any) -> None:
    tokens = free(pipe)
    stopped = 0
    for start in range(0, NEW - 3, 3):
        for width in (1, 3):
            string = pipe.tokenizer.decode(tokens[start : start + width])
            if "\ufffd" in string or not string:
                continue
            wanted = expected(pipe, stop_strings=[string, "never seen"])
            assert emitted(pipe, stop_strings=[string, "never seen"]) == wanted
            stopped += len(wanted) < NEW
    assert stopped > 3


def test_penalties_and_criteria_equal_generate(pipe: Any) -> None:
    for keywords in (
        {"repetition_penalty": 1.3},
        {"no_repeat_ngram_size": 2},
        {"repetition_penalty": 0.7, "no_repeat_ngram_size": 3},
        {"stopping_criteria": StoppingCriteriaList([AfterEight()])},
    ):
        wanted = expected(pipe, **keywords)
        assert wanted != free(pipe)
        assert emitted(pipe, **keywords) == wanted


def test_bad_words_and_least_lengths_equal_generate(pipe: Any) -> None:
    tokens = free(pipe)
    for words in ([[tokens[0]]], [tokens[3:5], [tokens[9]]]):
        wanted = expected(pipe, bad_words_ids=words)
        assert emitted(pipe, bad_words_ids=words) == wanted != tokens
    ends = {"eos_token_id": tokens[2], "min_new_tokens": 12}
    assert emitted(pipe, **ends) == expected(pipe, **ends)
    assert len(emitted(pipe, **ends)) >= 12


def test_a_generation_config_works_and_keywords_win(pipe: Any) -> None:
    config = GenerationConfig(max_new_tokens=9, repetition_penalty=1.4)
    wanted = expected(pipe, generation_config=copy.deepcopy(config), max_new_tokens=9)
    call = {"apply_chat_template": False, "generation_config": config}
    assert pipe(PROMPT, **call).tokens == [wanted]
    longer = expected(pipe, repetition_penalty=1.4, max_new_tokens=12)
    assert pipe(PROMPT, max_new_tokens=12, **call).tokens == [longer]


def test_defaults_of_the_model_are_honoured(pipe: Any) -> None:
    original = pipe.model.generation_config
    pipe.model.generation_config = copy.deepcopy(original)
    pipe.model.generation_config.update(repetition_penalty=1.5, max_new_tokens=11)
    try:
        wanted = expected(pipe, max_new_tokens=11)
        assert pipe(PROMPT, apply_chat_template=False).tokens == [wanted]
        assert len(wanted) == 11
    finally:
        pipe.model.generation_config = original


def test_sampling_has_the_defaults_of_transformers(pipe: Any) -> None:
    implied = emitted(pipe, do_sample=True, seed=3)
    assert implied == emitted(pipe, do_sample=True, seed=3, top_k=50, temperature=1.0)
    assert implied == emitted(pipe, temperature=1.0, seed=3)
    assert emitted(pipe, temperature=3.0, top_k=0, seed=3) != emitted(pipe, temperature=3.0, seed=3)
    assert emitted(pipe, temperature=0) == emitted(pipe, do_sample=False, temperature=0.7) == free(pipe)
    assert emitted(pipe, do_sample=True, top_k=1, seed=3) == free(pipe)


def test_sampled_output_is_that_of_plain_decoding(pipe: Any, bytes_pipeline: Any) -> None:
    for keywords in ({}, {"top_p": 0.8}, {"min_p": 0.05}, {"top_k": 5, "repetition_penalty": 1.2}):
        call = {"temperature": 1.2, "seed": 11, **keywords}
        plain = emitted(bytes_pipeline.set_accelerator("none"), **call)
        assert emitted(pipe, **call) == plain


def test_max_time_ends_the_row(pipe: Any) -> None:
    started = time.monotonic()
    output = pipe(PROMPT, apply_chat_template=False, max_new_tokens=900, max_time=1e-6)
    assert (len(output.tokens[0]), output.finish_reasons) == (1, ["stop"])
    assert time.monotonic() - started < 30


def test_guidance_mixes_two_prompts_as_generate_does(pipe: Any) -> None:
    negative = "a blue"
    ids = pipe.tokenizer(negative, return_tensors="pt").input_ids
    guided = {"guidance_scale": 2.5, "negative_prompt": negative}
    wanted = expected(pipe, guidance_scale=2.5, negative_prompt_ids=ids)
    assert emitted(pipe, **guided) == wanted != free(pipe)
    assert emitted(pipe, **{**guided, "guidance_scale": 1}) == free(pipe)
    rows = [(PROMPT, negative), ("red", "a much longer negative prompt")]
    call = {"guidance_scale": 2.5, "max_new_tokens": NEW, "apply_chat_template": False}
    batch = pipe([row[0] for row in rows], negative_prompt=[row[1] for row in rows], **call)
    assert batch.tokens == [pipe(text, negative_prompt=other, **call).tokens[0] for text, other in rows]
    assert batch.tokens[0] == wanted


def test_guidance_keeps_the_image_for_both_prompts(llava: VisionLanguagePipeline) -> None:
    call: dict[str, Any] = {"max_new_tokens": 16, "guidance_scale": 3.0, "negative_prompt": ["blue", None]}
    prompts, images = ["describe", "what is red"], [tiny_image(), tiny_image(1)]
    batch = llava(prompts, images=images, **call)
    plain = llava.set_accelerator("none")(prompts, images=images, **call)
    llava.set_accelerator("copy")
    assert batch.tokens == plain.tokens
    assert batch.tokens[0] != llava(prompts[0], images=images[0], max_new_tokens=16).tokens[0]


def test_stop_strings_work_with_a_tokenizer_of_whole_words(llava: VisionLanguagePipeline) -> None:
    whole = llava("describe", images=tiny_image(), max_new_tokens=24)
    words = whole.text[0].split()
    for stop in (words[5], " ".join(words[8:10]), words[0][:1]):
        output = llava("describe", images=tiny_image(), max_new_tokens=24, stop_strings=stop)
        assert output.text[0] == whole.text[0][: len(output.text[0])]
        assert stop in output.text[0] and stop not in " ".join(output.text[0].split()[:-1])
        assert output.finish_reasons == ["stop"]
