"""What of a prompt is in a picture: by hand-made readings, and that held-out captions are held out."""

import pytest
import torch

from mmspec.errors import CheckpointError, InputError
from mmspec.evaluation.attributes import SceneReader, held_out_captions, present
from mmspec.models.attribute_reader import PictureReading
from mmspec.scenes import parse_caption, parse_image_prompt

RING = ("small", "red", "plain", "ring")
SQUARE = ("large", "blue", "dotted", "square")


@pytest.mark.parametrize(
    ("text", "objects", "background", "asked", "right"),
    [
        ("a small red plain ring left of a large blue dotted square on sand.", (RING, SQUARE), "sand", 9, 9),
        ("a small red plain ring left of a large blue dotted square on sand.", (SQUARE, RING), "sand", 9, 1),
        ("a small red plain ring left of a large blue dotted square on sand.", (SQUARE,), "wood", 9, 4),
        ("a small red plain ring and a large blue dotted square", (SQUARE, RING), "sand", 8, 8),
        ("a large blue dotted square right of a red ring", (RING, SQUARE), "sand", 6, 6),
        ("a red ring", (SQUARE, RING), "sand", 2, 2),
        ("a red ring on grass", (), "grass", 3, 1),
    ],
)
def test_facts_that_are_present(text, objects, background, asked, right):
    prompt = parse_image_prompt(text)
    assert prompt is not None and prompt.asked == asked
    assert present(prompt, PictureReading(objects, background)) == right


class Blind:
    """Sees the same in every picture."""

    device = "cpu"

    def eval(self):
        return self

    def float(self):
        return self

    def read(self, pixels):
        assert pixels.min() >= -1 and pixels.max() <= 1
        return [PictureReading((RING,), "sand")] * len(pixels)

    def features(self, pixels):
        return pixels.mean((2, 3))


def test_accuracy_is_a_share_of_all_facts():
    reader = SceneReader(Blind())
    images = torch.rand(100, 3, 4, 4)
    captions = ["a red ring on sand"] * 50 + ["a large blue star on sand"] * 50
    assert reader.attribute_accuracy(images, captions) == pytest.approx((50 * 3 + 50 * 1) / (50 * 3 + 50 * 4))
    assert torch.allclose(reader.features(images), images.mean((2, 3)) * 2 - 1, atol=1e-6)


def test_a_prompt_of_nothing_and_a_missing_reader_are_refused(tmp_path):
    with pytest.raises(InputError, match="something else"):
        SceneReader(Blind()).attribute_accuracy(torch.rand(1, 3, 4, 4), ["something else"])
    with pytest.raises(CheckpointError, match="reader"):
        SceneReader.from_pretrained(tmp_path)


def test_held_out_captions():
    captions = held_out_captions(20, seed=3)
    assert captions == held_out_captions(40, seed=3)[:20] != held_out_captions(20)
    assert all(parse_caption(text) is not None for text in captions)
    with pytest.raises(InputError):
        held_out_captions(10**7)
