"""Figures of texts against independent counts, and files of references."""

import json
import math
from collections import Counter

import numpy as np
import pytest

from mmspec.errors import InputError, MissingDependencyError
from mmspec.evaluation.examples import scene_examples
from mmspec.evaluation.quality.text_scores import (
    METRICS,
    chosen_metrics,
    first_differences,
    read_references,
    scene_references,
    score_texts,
)
from mmspec.scenes import caption, sample_scene

TEXTS = ["a red ring on the grass", "a blue star left of a big ring", "two small dots", "no idea at all"]
REFERENCES = [
    ["a red ring on the grass", "a ring on grass"],
    ["a blue star to the left of a ring"],
    ["three small dots", "two dots", "dots"],
    ["a large green square"],
]


def grams(words, n):
    return Counter(tuple(words[i : i + n]) for i in range(len(words) - n + 1))


def slow_bleu(texts, references):
    """Papineni's formula: clipped counts, brevity against the nearest length, exponential smoothing."""
    log, smooth, length, nearest = 0.0, 1.0, 0, 0
    for text, some in zip(texts, references, strict=True):
        length += len(text.split())
        nearest += min((abs(len(one.split()) - len(text.split())), len(one.split())) for one in some)[1]
    for n in range(1, 5):
        right = total = 0
        for text, some in zip(texts, references, strict=True):
            said, allowed = grams(text.split(), n), Counter()
            for one in some:
                allowed |= grams(one.split(), n)
            right, total = right + sum((said & allowed).values()), total + sum(said.values())
        if right == 0:
            smooth *= 2
            log += math.log(1 / (smooth * total)) / 4
        else:
            log += math.log(right / total) / 4
    return 100 * math.exp(min(0.0, 1 - nearest / length)) * math.exp(log)


def slow_cider(texts, references, sigma=6.0):
    """CIDEr-D: cosine of tf-idf vectors of n-grams, clipped, with a penalty on lengths."""
    found = []
    for n in range(1, 5):
        seen = Counter(
            gram for some in references for gram in {g for one in some for g in grams(one.split(), n)}
        )

        def weigh(text, n=n, seen=seen):
            return {
                g: count * (math.log(len(texts)) - math.log(max(1, seen[g])))
                for g, count in grams(text.split(), n).items()
            }

        row = []
        for text, some in zip(texts, references, strict=True):
            one, values = weigh(text), []
            for other in map(weigh, some):
                dot = sum(min(one.get(g, 0), weight) * weight for g, weight in other.items())
                sizes = math.sqrt(sum(v * v for v in one.values()) * sum(v * v for v in other.values()))
                values.append(dot / sizes if sizes else 0.0)
            gaps = [len(text.split()) - len(one.split()) for one in some]
            row.append(
                np.mean([v * math.exp(-(g**2) / (2 * sigma**2)) for v, g in zip(values, gaps, strict=True)])
            )
        found.append(row)
    return 10 * float(np.mean(found))


def longest_common(one, other):
    table = np.zeros((len(one) + 1, len(other) + 1), int)
    for i, a in enumerate(one):
        for j, b in enumerate(other):
            table[i + 1, j + 1] = table[i, j] + 1 if a == b else max(table[i, j + 1], table[i + 1, j])
    return table[-1, -1]


def slow_rouge(texts, references):
    best = []
    for text, some in zip(texts, references, strict=True):
        said, scores = text.split(), []
        for one in some:
            common = longest_common(said, one.split())
            scores.append(2 * common / (len(said) + len(one.split())))
        best.append(max(scores))
    return np.mean(best)


def test_figures_are_the_formulas():
    found = score_texts(TEXTS, REFERENCES, METRICS)
    assert found["exact"].value == 0.25
    assert found["bleu"].value == pytest.approx(slow_bleu(TEXTS, REFERENCES), rel=1e-9)
    assert found["rouge"].value == pytest.approx(slow_rouge(TEXTS, REFERENCES), rel=1e-9)
    assert found["cider"].value == pytest.approx(slow_cider(TEXTS, REFERENCES), rel=1e-6)
    assert all(one.low <= one.value <= one.high for one in found.values())


def test_texts_on_the_wrong_rows_are_seen():
    """A planted bug: answers that slip by one row lose in every figure."""
    right = score_texts(TEXTS, REFERENCES, METRICS)
    slipped = score_texts(TEXTS[1:] + TEXTS[:1], REFERENCES, METRICS)
    assert all(slipped[name].value < right[name].value for name in METRICS)


def test_what_is_right_has_the_best_figures():
    texts = [some[0] for some in REFERENCES]
    found = score_texts(texts, [[one] for one in texts], METRICS)
    assert (found["exact"].value, found["rouge"].value) == (1.0, 1.0)
    assert found["bleu"].value == pytest.approx(100.0)


def test_white_space_around_an_answer_is_no_error_and_letters_are():
    found = score_texts([" yes ", "Yes", "yes"], [["yes"]] * 3, ["exact"])
    assert found["exact"].value == pytest.approx(2 / 3)


def test_too_few_texts_or_references_are_refused():
    for texts in [TEXTS[:2], TEXTS[:3]]:
        with pytest.raises(InputError, match="at least 3, with references for each"):
            score_texts(texts, REFERENCES[:2], ["exact"])


def test_a_text_without_references_is_refused():
    with pytest.raises(InputError, match="at least one for each"):
        score_texts(TEXTS, [*REFERENCES[:3], []], ["exact"])


def test_metrics_are_named_or_refused(hide):
    assert chosen_metrics("cider, exact", ()) == ["exact", "cider"]
    with pytest.raises(InputError, match="did you mean 'bleu'"):
        chosen_metrics("blue", ())
    hide("rouge_score")
    with pytest.raises(MissingDependencyError, match=r"pip install 'mmspec\[eval\]'"):
        chosen_metrics("exact,rouge", ())
    assert chosen_metrics("exact", ()) == ["exact"]


def test_first_differences_are_places_of_tokens_and_of_ends():
    plain = [[1, 2, 3], [4, 5], [6]]
    assert first_differences(plain, plain) == []
    assert first_differences(plain, [[1, 2, 3], [4], [7]]) == [(1, 1), (2, 0)]
    with pytest.raises(InputError, match="as many outputs"):
        first_differences(plain, plain[:2])


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


def test_files_that_cannot_be_read_are_refused(tmp_path):
    with pytest.raises(InputError, match="FileNotFoundError"):
        read_references(tmp_path / "none.jsonl")
    with pytest.raises(InputError, match="at least one prompt"):
        read_references(write(tmp_path / "empty.jsonl", "", ""))
