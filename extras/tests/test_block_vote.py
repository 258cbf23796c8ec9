"""Votes over block lengths."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest

from mmspec.errors import InputError
from mmspec.pipelines import MMSpecPipeline
from mmspec_extras.block_vote import block_vote
from tests.tiny_models import save_masked

ASKED: dict[str, Any] = {"apply_chat_template": False, "max_new_tokens": 6}


@pytest.fixture(scope="module")
def pipe(tmp_path_factory: pytest.TempPathFactory) -> MMSpecPipeline:
    return MMSpecPipeline.from_pretrained(save_masked("llada", tmp_path_factory.mktemp("llada")))


def first_word(text: str) -> str:
    return text.split()[0] if text.split() else ""


def test_the_answer_is_that_of_most_outputs(pipe: Any) -> None:
    found = block_vote(pipe, "how many", extract=first_word, block_lengths=(4, 1, 2), samples=3, **ASKED)
    assert list(found.texts) == [1, 2, 4] and pipe.accelerator.name == "none"
    counted = Counter(first_word(text) for texts in found.texts.values() for text in texts)
    assert found.votes == {word: count for word, count in counted.items() if word}
    assert found.votes[found.answer] == max(found.votes.values()) and found.forwards == 18
    pipe.set_accelerator("low_confidence", block_length=2)
    alone = pipe("how many", temperature=0.9, seed=[1], **ASKED)
    assert alone.text[0] == found.texts[2][1]
    pipe.set_accelerator("none")


def test_a_vote_ends_when_nothing_can_change(pipe: Any) -> None:
    sure = block_vote(
        pipe, "how many", extract=lambda _: "two", block_lengths=(1, 2, 3, 4), samples=2, **ASKED
    )
    assert sure.answer == "two" and list(sure.texts) == [1, 2, 3]
    single = block_vote(pipe, "how many", extract=lambda _: "", block_lengths=(2,), samples=1, **ASKED)
    assert single.answer == "" and single.votes == {}


def test_no_samples_and_no_lengths_are_refused(pipe: Any) -> None:
    for name, bad in (("samples", 0), ("block_lengths", ())):
        with pytest.raises(InputError, match=name):
            block_vote(pipe, "how many", **{name: bad})  # type: ignore[arg-type]
