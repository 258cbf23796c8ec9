"""Examples for checks and timings: scenes, the user's own, and JSON lines."""

import json

import pytest

from mmspec.errors import InputError
from mmspec.evaluation.examples import TASKS, own_examples, read_examples, scene_examples
from mmspec.reference.scenes import HELD_OUT_SEEDS

IMAGES = {"two_images": 2, "clip": 4}


@pytest.mark.parametrize("task", TASKS)
def test_scenes_are_held_out_and_the_same_every_time(task):
    one, other = scene_examples(task, 3), scene_examples(task, 3)
    assert [example.turns for example in one] == [example.turns for example in other]
    assert [[image.tobytes() for image in example.images] for example in one] == [
        [image.tobytes() for image in example.images] for example in other
    ]
    assert all(int(example.identifier.removeprefix("scene ")) in HELD_OUT_SEEDS for example in one)
    assert all(len(example.images) == IMAGES.get(task, 1) for example in one)
    pixels = [image.tobytes() for example in one for image in example.images]
    assert len(set(pixels)) == len(pixels), "every prompt has images of its own"


def test_mixed_scenes_have_three_categories():
    assert {example.category for example in scene_examples("mixed", 6)} == {"caption", "describe", "question"}


def test_other_seeds_give_other_scenes():
    assert scene_examples("caption", 1, seed=1)[0].identifier != scene_examples("caption", 1)[0].identifier


@pytest.mark.parametrize(
    ("task", "count", "seed"), [("captions", 1, 0), ("caption", 0, 0), ("caption", 1, -1)]
)
def test_impossible_scenes_are_refused(task, count, seed):
    with pytest.raises(InputError):
        scene_examples(task, count, seed)


def test_prompts_and_images_are_paired():
    assert [(e.turns[0], e.images) for e in own_examples(["p"], ["a", "b"])] == [("p", ("a",)), ("p", ("b",))]
    assert [(e.turns[0], e.images) for e in own_examples(["p", "q"], ["a"])] == [("p", ("a",)), ("q", ("a",))]
    assert [(e.turns[0], e.images) for e in own_examples(["p"], [])] == [("p", ())]
    with pytest.raises(InputError, match="2 prompts for 3 images"):
        own_examples(["p", "q"], ["a", "b", "c"])


def test_lines_of_a_file(tmp_path):
    path = tmp_path / "x.jsonl"
    for name in ("images/a.png", "b.png"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).touch()
    lines = [
        {"id": 7, "image": "images/a.png", "turns": ["one", "two"], "category": "chart", "topic": "sales"},
        {"prompt": "three", "image": None},
        {"turns": ["four"], "image": ["https://example.com/a.png", "b.png"], "topic": "sales"},
    ]
    path.write_text("\n\n".join(map(json.dumps, lines)) + "\n")
    first, second, third = read_examples(path)
    assert first.turns == ("one", "two")
    assert first.images == (str(tmp_path / "images/a.png"),)
    assert (first.category, first.identifier) == ("chart", "7")
    assert (second.turns, second.images) == (("three",), ())
    assert third.images == ("https://example.com/a.png", str(tmp_path / "b.png"))
    assert third.category == "sales"
    assert len(read_examples(path, 2)) == 2


def test_images_of_the_mmspec_benchmark_lie_in_a_folder_that_its_lines_do_not_name(tmp_path):
    path, images = tmp_path / "mmspec.jsonl", tmp_path / "images"
    images.mkdir()
    for file in (images / "in-folder.jpg", images / "in-both.jpg", tmp_path / "in-both.jpg"):
        file.touch()
    line = {"id": 1, "image": ["in-folder.jpg", "in-both.jpg", str(images / "in-both.jpg")], "turns": ["one"]}
    path.write_text(json.dumps(line))
    (example,) = read_examples(path)
    expected = (images / "in-folder.jpg", tmp_path / "in-both.jpg", images / "in-both.jpg")
    assert example.images == tuple(map(str, expected)), "beside the file comes first, then its folder images"


@pytest.mark.parametrize("image", ["b.png", "images", "", "x" * 5000, "b\0.png"])
def test_an_image_that_is_nowhere_is_refused_with_its_line_and_the_places(tmp_path, image):
    path = tmp_path / "x.jsonl"
    (tmp_path / "images").mkdir()
    path.write_text('{"turns": ["a"]}\n' + json.dumps({"turns": ["a"], "image": image}))
    with pytest.raises(InputError, match=r"x\.jsonl:2: image: got") as caught:
        read_examples(path)
    assert f"a file that is in {tmp_path} or in {tmp_path / 'images'}" in str(caught.value)
    assert read_examples(path, 1), "what is not asked for need not be there"


@pytest.mark.parametrize(
    "line", ["{", "[]", "3", "{}", '{"turns": []}', '{"turns": [1]}', '{"turns": ["a"], "image": 3}']
)
def test_a_bad_line_is_named_by_its_number(tmp_path, line):
    path = tmp_path / "x.jsonl"
    path.write_text('{"turns": ["a"]}\n' + line)
    with pytest.raises(InputError, match=r"x\.jsonl:2"):
        read_examples(path)


@pytest.mark.parametrize("content", [None, b"", b"\n \n", b"\xff\xfe"])
def test_a_file_without_lines_is_refused(tmp_path, content):
    path = tmp_path / "x.jsonl"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match="jsonl"):
        read_examples(path)
