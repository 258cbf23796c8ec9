"""Stop strings: where they end a row, and the cost of preparing them."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast, StopStringCriteria

from mmspec.pipelines.callbacks import StopStringsCriterion
from tests.pipelines.small_tokenizers import BYTES, SPACED, TOKENIZERS, made


@pytest.mark.parametrize("kind", TOKENIZERS)
@settings(deadline=None, max_examples=25)
@given(data=st.data())
def test_they_end_a_row_where_those_of_transformers_do(kind: str, data: Any) -> None:
    tokenizer = TOKENIZERS[kind]
    few = data.draw(st.lists(st.integers(0, len(tokenizer) + 2), min_size=1, max_size=6))
    tokens = data.draw(st.lists(st.sampled_from(few), min_size=1, max_size=16))
    text = tokenizer.decode([token for token in tokens if token < len(tokenizer)]) or "a"
    cuts = st.tuples(st.integers(0, len(text) - 1), st.integers(1, 8))
    strings = [
        text[start : start + size] for start, size in data.draw(st.lists(cuts, min_size=1, max_size=3))
    ]
    try:
        theirs = StopStringCriteria(tokenizer, strings)
        ours = StopStringsCriterion(tokenizer, strings)
    except ValueError:  # words alone, or a string that no tokens spell
        return
    for count in range(1, len(tokens) + 1):
        ids = torch.tensor([tokens[:count]])
        assert torch.equal(ours(ids, ids), theirs(ids, ids))  # type: ignore[arg-type]


def test_a_string_is_found_across_the_tokens_of_one_character() -> None:
    criterion = StopStringsCriterion(BYTES, ["é"])
    whole = BYTES("the é")["input_ids"]
    found = [
        bool(criterion(torch.tensor([whole[:count]]), torch.empty(0))) for count in range(1, len(whole) + 1)
    ]
    assert found == [False] * (len(whole) - 1) + [True]


def test_new_strings_cost_no_look_at_the_vocabulary(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = made(SPACED + [f"word{index}" for index in range(30_000)], None)
    StopStringsCriterion(tokenizer, ["first"])
    monkeypatch.setattr(PreTrainedTokenizerFast, "get_vocab", None)
    began = time.process_time()
    for index in range(16):
        StopStringsCriterion(tokenizer, [f"</{index}>"])(torch.tensor([[5, 6, 7]]), torch.empty(0))
    assert time.process_time() - began < 0.5
    monkeypatch.undo()
    tokenizer.add_tokens(["<call>"])
    added = torch.tensor([[len(tokenizer) - 1]])
    assert StopStringsCriterion(tokenizer, ["call>"])(added, torch.empty(0))
