import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.scenes import COLOURS, SHAPES, questions, sample_scene
from mmspec.scenes.language import NUMBERS
from reference.processors import build_processor
from reference.vlm_data import IGNORED, MENTION_CLASSES, conversation_batch, mentions

NAMES = list(MENTION_CLASSES)


@given(st.integers(min_value=0, max_value=2**62))
@settings(max_examples=150, deadline=None)
def test_labels_of_a_mention_agree_with_the_answer(seed: int) -> None:
    scene = sample_scene(seed)
    for asked in questions(scene, np.random.default_rng(seed), 10):
        found = mentions(scene, asked.text)
        if asked.kind == "background":
            assert not found
            continue
        assert len(found) == (2 if asked.kind in ("side", "height") else 1)
        labels = dict(zip(NAMES, found[0][1], strict=True))
        if asked.kind == "count":
            assert NUMBERS[labels["count"]] == asked.answer
        elif asked.kind == "exists":
            assert (labels["count"] > 0) == (asked.answer == "yes")
        else:
            assert labels["count"] == 1, "a reference means one object"
        if asked.kind == "colour":
            assert COLOURS[labels["colour"]] == asked.answer
        if asked.kind == "shape":
            assert SHAPES[labels["shape"]] == asked.answer
        if labels["count"] != 1:
            assert set(found[0][1][:-1]) == {IGNORED}


def test_mentions_are_labelled_at_their_last_word() -> None:
    tokenizer = build_processor().tokenizer
    batch = conversation_batch(np.arange(12), tokenizer, 64, with_description=False)
    rows, positions = batch.mention_at.unbind(-1)
    words = {tokenizer.decode([token]).strip() for token in batch.tokens[rows, positions].tolist()}
    assert words <= {"object", "objects", *SHAPES, *(f"{shape}s" for shape in SHAPES), "crosses"}
