"""Captions, prompts for images, descriptions and questions: they describe the scene, and can be parsed."""

import re

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.scenes import (
    CAPTION_PROMPTS,
    DESCRIPTION_PROMPTS,
    IMAGE_TOKENS,
    KINDS,
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
from reference.processors import DIGITS, PUNCTUATION, words

SEEDS = st.integers(min_value=0, max_value=2**62)


def split(text: str) -> list[str]:
    return re.findall(r"[a-z]+|[^a-z ]", text)


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


def test_no_word_is_outside_the_vocabulary() -> None:
    known = {*words(), *PUNCTUATION, *DIGITS}
    for seed in range(200):
        scene, rng = sample_scene(seed), np.random.default_rng(seed)
        texts = [caption(scene), describe(scene)]
        texts += [part for asked in questions(scene, rng, 6) for part in (asked.text, asked.answer)]
        assert set(split(" ".join(texts))) <= known
    assert set(split(" ".join(CAPTION_PROMPTS + DESCRIPTION_PROMPTS))) <= known
