"""Examples for checks and timings: scenes, and the user's own."""

import pytest

from mmspec.errors import InputError
from mmspec.evaluation.examples import TASKS, scene_examples
from mmspec.scenes import HELD_OUT_SEEDS

IMAGES = {"two_images": 2, "clip": 4}


def test_scenes_are_held_out_and_the_same_every_time():
    for task in TASKS:
        one, other = scene_examples(task, 3), scene_examples(task, 3)
        assert [example.turns for example in one] == [example.turns for example in other]
        assert [[image.tobytes() for image in example.images] for example in one] == [
            [image.tobytes() for image in example.images] for example in other
        ]
        assert all(int(example.identifier.removeprefix("scene ")) in HELD_OUT_SEEDS for example in one)
        assert all(len(example.images) == IMAGES.get(task, 1) for example in one)
        pixels = [image.tobytes() for example in one for image in example.images]
        assert len(set(pixels)) == len(pixels), "every prompt has images of its own"


def test_mixed_scenes_have_three_categories_and_impossible_ones_are_refused():
    assert {example.category for example in scene_examples("mixed", 6)} == {"caption", "describe", "question"}
    assert scene_examples("caption", 1, seed=1)[0].identifier != scene_examples("caption", 1)[0].identifier
    for task, count, seed in [("captions", 1, 0), ("caption", 0, 0), ("caption", 1, -1)]:
        with pytest.raises(InputError):
            scene_examples(task, count, seed)
