"""Figures of texts against independent counts, and files of references."""

import json

import pytest

from mmspec.errors import InputError
from mmspec.evaluation.examples import scene_examples
from mmspec.evaluation.quality.text_scores import (
    METRICS,
    read_references,
    scene_references,
    score_texts,
)
from mmspec.scenes import caption, sample_scene

BLEU, ROUGE, CIDER = 48.860050652093705, 0.6558823529411765, 3.1283549860189592
TEXTS = ["a red ring on the grass", "a blue star left of a big ring", "two small dots", "no idea at all"]
REFERENCES = [
    ["a red ring on the grass", "a ring on grass"],
    ["a blue star to the left of a ring"],
    ["three small dots", "two dots", "dots"],
    ["a large green square"],
]


def test_figures_are_the_formulas():
    """The expected numbers come from the formulas of Papineni, Lin and Vedantam."""
    found = score_texts(TEXTS, REFERENCES, METRICS)
    assert found["exact"].value == 0.25
    assert found["bleu"].value == pytest.approx(BLEU, rel=1e-9)
    assert found["rouge"].value == pytest.approx(ROUGE, rel=1e-9)
    assert found["cider"].value == pytest.approx(CIDER, rel=1e-6)
    assert all(one.low <= one.value <= one.high for one in found.values())


def test_what_is_right_has_the_best_figures():
    texts = [some[0] for some in REFERENCES]
    found = score_texts(texts, [[one] for one in texts], METRICS)
    assert (found["exact"].value, found["rouge"].value) == (1.0, 1.0)
    assert found["bleu"].value == pytest.approx(100.0)
    found = score_texts([" yes ", "Yes", "yes"], [["yes"]] * 3, ["exact"])
    assert found["exact"].value == pytest.approx(2 / 3)  # white space is no error, and letters are


def test_scenes_have_their_captions_and_answers():
    items = scene_references(3, seed=5)
    assert [item.example.category for item in items] == ["caption", "question"] * 3
    assert items[2].references == (caption(sample_scene(20_006)),)
    asked = [example.turns for example in scene_examples("question", 3, 5)]
    assert [item.example.turns for item in items[1::2]] == asked
    assert all(item.references[0] for item in items)


def write(path, *lines):
    path.write_text("\n".join(line if isinstance(line, str) else json.dumps(line) for line in lines))
    return path


def test_references_are_read_with_their_questions(tmp_path):
    path = write(
        tmp_path / "own.jsonl",
        {"prompt": "what?", "references": "this", "category": "a"},
        "",
        {"turns": ["which?"], "references": ["one", "another"]},
    )
    first, second = read_references(path)
    assert (first.example.turns, first.references, first.example.category) == (("what?",), ("this",), "a")
    assert second.references == ("one", "another")
    assert len(read_references(path, 1)) == 1


GOOD = {"prompt": "what?", "references": "this"}


def test_lines_that_cannot_be_used_are_refused_with_their_number(tmp_path):
    for line in [
        "{",
        "[]",
        {"prompt": "what?"},
        {"prompt": "what?", "references": []},
        {"prompt": "what?", "references": [1]},
        {"prompt": "what?", "references": " "},
        {"prompt": "what?", "references": {"a": 1}},
        {"turns": ["one", "two"], "references": "x"},
        {"references": "x"},
        {"prompt": "what?", "references": "x", "image": "nowhere.png"},
    ]:
        path = write(tmp_path / "own.jsonl", GOOD, "", line, GOOD)
        with pytest.raises(InputError, match=r"own\.jsonl:3"):
            read_references(path)
