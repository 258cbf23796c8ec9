"""Prompts for images: what is sampled can be read, and what people write means what they mean."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mmspec.errors import InputError
from mmspec.scenes import (
    IMAGE_TOKENS,
    caption,
    object_masks,
    parse_image_prompt,
    render,
    sample_image_prompt,
    sample_scene,
)
from mmspec.scenes.world import GENERAL

SEEDS = st.integers(min_value=0, max_value=2**62)


@given(SEEDS)
@settings(max_examples=200, deadline=None)
def test_a_prompt_asks_for_nothing_but_its_scene_and_can_be_read_back(seed: int) -> None:
    scene = sample_scene(seed, profile=IMAGE_TOKENS)
    prompt = sample_image_prompt(scene, np.random.default_rng(seed))
    assert prompt.background in (None, scene.background)
    for asked, thing in zip(prompt.objects, scene.objects, strict=True):
        assert asked[-1] == thing.shape
        assert all(value in (None, real) for value, real in zip(asked, thing.attributes, strict=True))
    read = parse_image_prompt(prompt.text)
    assert read is not None
    assert (read.background, read.ordered, read.asked) == (prompt.background, prompt.ordered, prompt.asked)
    assert set(read.objects) == set(prompt.objects)
    if read.ordered:
        assert read.objects == prompt.objects


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_a_caption_is_read_entirely(seed: int) -> None:
    scene = sample_scene(seed, profile=IMAGE_TOKENS)
    read = parse_image_prompt(caption(scene))
    assert read is not None and read.ordered
    assert read.objects == tuple(thing.attributes for thing in scene.objects)
    assert read.background == scene.background
    assert read.asked == 4 * len(scene.objects) + 1


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


def test_a_text_that_names_no_object_is_no_prompt() -> None:
    for text in ("", "a corgi in space", "red on grass", "left of"):
        assert parse_image_prompt(text) is None, text


@given(SEEDS)
@settings(max_examples=100, deadline=None)
def test_scenes_for_image_tokens_have_one_or_two_large_objects_in_a_visible_order(seed: int) -> None:
    scene = sample_scene(seed, profile=IMAGE_TOKENS)
    assert 1 <= len(scene.objects) <= 2
    assert all(thing.diameter >= 26 for thing in scene.objects)
    steps = np.diff([thing.x for thing in scene.objects])
    assert (steps >= IMAGE_TOKENS.min_step).all()
    masks = object_masks(scene, 64)
    assert masks.sum(axis=(1, 2)).min() > 4 * 16, "every object covers several tokens of 4 x 4 pixels"
    assert not (masks.sum(axis=0) > 1).any()


def test_a_profile_changes_no_scene_of_another() -> None:
    assert sample_scene(5) == sample_scene(5, profile=GENERAL) != sample_scene(5, profile=IMAGE_TOKENS)
    assert not np.array_equal(
        render(sample_scene(3, profile=IMAGE_TOKENS), 64), render(sample_scene(4, profile=IMAGE_TOKENS), 64)
    )


def test_a_profile_has_its_own_largest_number_of_objects() -> None:
    assert len(sample_scene(1, objects=2, profile=IMAGE_TOKENS).objects) == 2
    with pytest.raises(InputError, match="1 to 2"):
        sample_scene(1, objects=3, profile=IMAGE_TOKENS)
