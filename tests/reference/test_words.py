"""Captions, prompts for images, descriptions and questions: they say what is there, and are read back."""

import re

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.errors import InputError
from mmspec.scenes import (
    CAPTION_PROMPTS,
    COLOURS,
    DESCRIPTION_PROMPTS,
    IMAGE_TOKENS,
    KINDS,
    SHAPES,
    Scene,
    ask,
    caption,
    describe,
    parse_image_prompt,
    questions,
    sample_image_prompt,
    sample_scene,
)
from mmspec.scenes.language import NUMBERS, PLURALS
from reference.processors import DIGITS, PUNCTUATION, build_processor, words
from reference.vlm_data import IGNORED, MENTION_CLASSES, conversation_batch, mentions
from reference.vlm_scores import _score_parts

SEEDS = st.integers(min_value=0, max_value=2**62)


def split(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[^a-z ]", text)


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_a_caption_is_read_as_a_caption_and_as_a_prompt(seed: int) -> None:
    scene = sample_scene(seed)
    asked = parse_image_prompt(caption(scene))
    assert asked is not None and asked.ordered and asked.background == scene.background
    assert asked.objects == tuple(thing.attributes for thing in scene.objects)
    parts = _score_parts([caption(scene)], [scene])
    assert {parts["count"], parts["background"], *parts["attributes"].values()} == {1.0}


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_a_prompt_asks_for_nothing_but_its_scene_and_can_be_read_back(seed: int) -> None:
    scene = sample_scene(seed, profile=IMAGE_TOKENS)
    prompt = sample_image_prompt(scene, np.random.default_rng(seed))
    assert prompt.background in (None, scene.background)
    for asked, thing in zip(prompt.objects, scene.objects, strict=True):
        assert asked[-1] == thing.shape
        assert all(value in (None, real) for value, real in zip(asked, thing.attributes, strict=True))
    read = parse_image_prompt(prompt.text)
    assert read is not None and (read.background, read.ordered) == (prompt.background, prompt.ordered)
    assert set(read.objects) == set(prompt.objects) and (read.objects == prompt.objects or not read.ordered)


RING = (None, "red", None, "ring")
SQUARE = ("small", "blue", None, "square")


def test_what_people_write_is_understood() -> None:
    for text, objects, background, ordered in (
        ("a red ring left of a small blue square", (RING, SQUARE), None, True),
        ("A small blue square to the right of a red ring, on grass!", (RING, SQUARE), "grass", True),
        ("a red ring and a small blue square", (RING, SQUARE), None, False),
        ("please draw me one Red Ring", (RING,), None, True),
        ("a star", ((None, None, None, "star"),), None, True),
        ("on wood, a red glass ring", (RING,), "wood", True),
    ):
        read = parse_image_prompt(text)
        assert read is not None
        assert (read.objects, read.background, read.ordered) == (objects, background, ordered)
    for text in ("", "a corgi in space", "red on grass", "left of"):
        assert parse_image_prompt(text) is None, text
    for text in ("", "a red circle on sand.", "a small red plain circle", "a small red plain cat on sand."):
        parts = _score_parts([text], [sample_scene(0)])
        assert {parts["count"], parts["background"], *parts["attributes"].values()} == {0.0}, text


@given(SEEDS)
@settings(max_examples=100, deadline=None)
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
@settings(max_examples=400, deadline=None)
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


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_questions_differ_and_the_labels_of_their_mentions_agree_with_the_answers(seed: int) -> None:
    scene, count = sample_scene(seed), seed % 17
    told = questions(scene, np.random.default_rng(seed), count)
    assert len({question.text for question in told}) == len(told) == count
    for asked in told:
        found = mentions(scene, asked.text)
        if asked.kind == "background":
            assert not found
            continue
        assert len(found) == (2 if asked.kind in ("side", "height") else 1)
        labels = dict(zip(MENTION_CLASSES, found[0][1], strict=True))
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
    ends = {tokenizer.decode([token]).strip() for token in batch.tokens[rows, positions].tolist()}
    assert ends <= {"object", "objects", *SHAPES, *PLURALS.values()}


def test_no_word_is_outside_the_vocabulary() -> None:
    known = {*words(), *PUNCTUATION, *DIGITS}
    for seed in range(200):
        scene, rng = sample_scene(seed), np.random.default_rng(seed)
        texts = [caption(scene), describe(scene)]
        texts += [part for asked in questions(scene, rng, 6) for part in (asked.text, asked.answer)]
        assert set(split(" ".join(texts))) <= known
    assert set(split(" ".join(CAPTION_PROMPTS + DESCRIPTION_PROMPTS))) <= known


def test_an_unknown_kind_of_question_gets_the_nearest_name() -> None:
    with pytest.raises(InputError, match="did you mean 'colour'"):
        ask(sample_scene(0), "color", np.random.default_rng(0))
