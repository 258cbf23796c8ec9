"""Numbers of NumPy are numbers, wherever one is given; its truth values are none."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import mmspec
from mmspec import accelerators
from mmspec.decoding.random_stream import RandomStream
from mmspec.errors import InputError
from mmspec.pipelines import VisionLanguagePipeline
from mmspec.validation import is_integer, plain_numbers, require_number
from tests.pipelines.byte_level import byte_level_tokenizer
from tests.tiny_models import tiny_llama

SETTINGS: dict[str, Any] = {
    "max_new_tokens": 12,
    "temperature": 0.75,
    "top_k": 9,
    "top_p": 0.5,
    "min_p": 0.0625,
    "seed": 5,
    "guidance_scale": 1.5,
    "repetition_penalty": 1.25,
    "no_repeat_ngram_size": 3,
    "suppress_tokens": [7, 8],
    "eos_token_id": [9, 10],
    "max_time": 500.0,
    "bad_words_ids": [[3, 4]],
}


def of_numpy(value: Any, whole: type = np.int64, real: type = np.float32) -> Any:
    if isinstance(value, list):
        return [of_numpy(item) for item in value]
    return (whole if isinstance(value, int) else real)(value)


@pytest.fixture(scope="module")
def pipe() -> VisionLanguagePipeline:
    return VisionLanguagePipeline(tiny_llama(vocab=300), byte_level_tokenizer(), "copy")


@pytest.mark.parametrize(
    "convert",
    [of_numpy, lambda value: of_numpy(value, np.uint16, np.float64), np.array],
    ids=["64 bits", "others", "arrays of no dimension"],
)
def test_settings_of_a_call_may_be_numbers_of_numpy(convert: Any, pipe: Any) -> None:
    call = {"apply_chat_template": False, "negative_prompt": "a"}
    wanted = pipe("the red", **call, **SETTINGS)
    output = pipe("the red", **call, **{name: convert(value) for name, value in SETTINGS.items()})
    assert output.tokens == wanted.tokens
    rows = pipe(["a", "b"], apply_chat_template=False, max_new_tokens=4, temperature=[0.5, 1.0], seed=[1, 2])
    assert rows.tokens == pipe(
        ["a", "b"],
        apply_chat_template=False,
        max_new_tokens=4,
        temperature=np.array([0.5, 1.0], np.float32),
        seed=np.array([1, 2]),
    ).tokens  # fmt: skip


def test_options_of_accelerators_and_seeds_may_be_numbers_of_numpy(pipe: Any) -> None:
    assert accelerators.sjd(window=np.int64(16)).drafter.window == 16
    assert accelerators.copy(num_draft_tokens=np.int32(4)).drafter.max_nodes == 5
    for options in (
        {"num_draft_tokens": np.array(4)},
        {"num_draft_tokens": np.uint8(4), "min_match": np.int64(2)},
    ):
        made = mmspec.accelerate("copy", seed=np.int64(3), **options)  # type: ignore[arg-type]
        ids = torch.tensor([[5, 6, 7, 5, 6]])
        how: dict[str, Any] = {"max_new_tokens": 5, "do_sample": True, "pad_token_id": 0}
        wanted = pipe.model.generate(ids, **how, custom_generate=mmspec.accelerate("copy", seed=3))
        assert torch.equal(pipe.model.generate(ids, **how, custom_generate=made), wanted)
    keys = RandomStream.from_seed([3, 4], 2).keys
    assert torch.equal(RandomStream.from_seed(np.array([3, 4]), 2).keys, keys)  # type: ignore[arg-type]
    with pipe.running_batch(rows=np.int64(2)) as batch:
        assert batch.free == 2


def test_truth_values_and_words_are_no_numbers(pipe: Any) -> None:
    for value in (np.True_, True, np.str_("8"), np.array("8"), np.array([1, 2])):
        assert not is_integer(value)
        with pytest.raises(InputError):
            require_number("x", value, 0, 9, "a number")
        with pytest.raises(InputError, match="max_new_tokens"):
            pipe("a", apply_chat_template=False, max_new_tokens=value)
    require_number("x", np.float32(0.5), 0, 9, "a number")
    with pytest.raises(InputError):
        require_number("x", np.float32("nan"), 0, 9, "a number")
    assert plain_numbers({(np.int64(1),): [np.float64(0.5)]}) == {(1,): [0.5]}
