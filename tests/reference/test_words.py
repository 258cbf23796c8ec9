import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.errors import InputError
from mmspec.scenes import (
    CAPTION_PROMPTS,
    DESCRIPTION_PROMPTS,
    KINDS,
    Scene,
    ask,
    caption,
    clip_caption,
    describe,
    parse_caption,
    questions,
    sample_clip,
    sample_scene,
)
from mmspec.scenes.language import NUMBERS, PLURALS
from reference.processors import DIGITS, PUNCTUATION, words

SEEDS = st.integers(min_value=0, max_value=2**62)


def split(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[^a-z ]", text)


@given(SEEDS)
@settings(max_examples=300, deadline=None)
def test_a_caption_reads_back_to_its_scene(seed: int) -> None:
    scene = sample_scene(seed)
    reading = parse_caption(caption(scene))
    assert reading is not None
    assert reading.objects == tuple(thing.attributes for thing in scene.objects)
    assert reading.background == scene.background


def test_what_is_no_caption_is_not_read() -> None:
    for text in ("", "a red circle on sand.", "a small red plain circle", "a small red plain cat on sand."):
        assert parse_caption(text) is None, text


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_a_description_is_long_and_says_every_fact(seed: int) -> None:
    scene = sample_scene(seed)
    text = describe(scene)
    assert 100 <= len(split(text)) <= 240
    assert f"of {NUMBERS[len(scene.objects)]} object" in text
    assert f"on a background of {scene.background}." in text
    for thing in scene.objects:
        assert f"object from the left is a {' '.join(thing.attributes)}." in text
        assert f"it is in the {thing.row} {thing.column} part" in text
    relations = re.findall(r"is left of the [a-z ]+ and (above|below|level with) it", text)
    assert len(relations) == len(scene.objects) * (len(scene.objects) - 1) // 2


def fits(reference: str, scene: Scene) -> list[int]:
    """Indices of the objects that a reference in a question could mean, found from its words alone."""
    named = reference.removeprefix("the ").removesuffix("object").strip()
    count = len(scene.objects)
    if named == "":
        return list(range(count))
    places = {"left": 0, "right": count - 1, "middle": 1}
    if named in places and reference.endswith("object"):
        return [places[named]]
    return [index for index, thing in enumerate(scene.objects) if named in thing.attributes]


@given(SEEDS, st.sampled_from(KINDS))
@settings(max_examples=600, deadline=None)
def test_an_answer_is_what_the_scene_says(seed: int, kind: str) -> None:
    scene = sample_scene(seed)
    asked = ask(scene, kind, np.random.default_rng(seed))
    if asked is None:
        assert kind in ("side", "height")
        return
    text = asked.text.replace("color", "colour")
    if kind in ("colour", "shape", "size", "pattern", "where"):
        match = re.search(r"the [a-z ]+(?=\?)", text)
        assert match is not None
        (index,) = fits(match.group(), scene)
        thing = scene.objects[index]
        wanted = f"{thing.row} {thing.column}" if kind == "where" else getattr(thing, kind)
        assert wanted not in match.group()
    elif kind == "count":
        what = text.removeprefix("how many ").removesuffix(" are there?").removesuffix("objects").strip()
        single = {plural: shape for shape, plural in PLURALS.items()}.get(what, what)
        wanted = NUMBERS[sum(single in ("", *thing.attributes) for thing in scene.objects)]
    elif kind == "exists":
        colour, shape = text.removesuffix("?").split()[-2:]
        wanted = "yes" if any((t.colour, t.shape) == (colour, shape) for t in scene.objects) else "no"
    elif kind == "background":
        wanted = scene.background
    else:
        separator = " left of " if kind == "side" else " above, below or level with "
        one, other = (fits(part, scene) for part in text[3:-1].split(separator))
        assert len(one) == len(other) == 1 and one != other
        left, right = scene.objects[one[0]], scene.objects[other[0]]
        if kind == "side":
            wanted = "yes" if left.x < right.x else "no"
        else:
            wanted = "level" if left.row == right.row else "above" if left.y < right.y else "below"
    assert asked.answer == wanted


@given(SEEDS, st.integers(min_value=0, max_value=16))
@settings(max_examples=100, deadline=None)
def test_questions_differ_and_come_in_the_number_asked_for(seed: int, count: int) -> None:
    asked = questions(sample_scene(seed), np.random.default_rng(seed), count)
    assert len({question.text for question in asked}) == len(asked) == count


def test_no_word_is_outside_the_vocabulary() -> None:
    known = {*words(), *PUNCTUATION, *DIGITS}
    for seed in range(400):
        scene, rng = sample_scene(seed), np.random.default_rng(seed)
        texts = [caption(scene), describe(scene), clip_caption(sample_clip(seed))]
        texts += [part for asked in questions(scene, rng, 6) for part in (asked.text, asked.answer)]
        assert set(split(" ".join(texts))) <= known
    assert set(split(" ".join(CAPTION_PROMPTS + DESCRIPTION_PROMPTS))) <= known


def test_an_unknown_kind_of_question_gets_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean 'colour'"):
        ask(sample_scene(0), "color", np.random.default_rng(0))
