"""Scores of generated images: the rules for facts, and a perfect score with a perfect reader."""

from typing import Any

import numpy as np
import pytest
import torch

from mmspec.evaluation.quality.attributes import AttributeJudge, facts_present
from mmspec.scenes import IMAGE_TOKENS, caption, parse_image_prompt, sample_scene
from mmspec.scenes.reader import AttributeReader, ImageReading
from mmspec.training.data.scenes import image_pixels
from reference.image_data import IMAGE_SIZE, READER_PATCH
from reference.image_scores import attribute_scores
from reference.reader import build_reader
from reference.vlm_data import PATCH_CLASSES, patch_labels

RING = ("small", "red", "plain", "ring")
STAR = ("large", "blue", "dotted", "star")
CROSS = ("large", "green", "plain", "cross")


@pytest.mark.parametrize(
    ("text", "seen", "present"),
    [
        ("a small ring left of a blue star on grass", (RING, STAR), "size shape colour shape background"),
        ("a small red ring left of a blue star on sand", (STAR, RING), ""),  # each on the other's side
        ("a blue star and a red ring", (RING, STAR), "colour shape colour shape"),  # the better match
        ("a red ring left of a blue star", (RING, CROSS, STAR), "colour shape colour shape"),  # one too many
        ("a ring left of a star", (RING,), "shape"),
        ("a ring left of a star", (STAR,), "shape"),
        ("a ring", (), ""),
    ],
)
def test_facts_that_are_present(text: str, seen: tuple[Any, ...], present: str) -> None:
    prompt = parse_image_prompt(text)
    assert prompt is not None
    facts = list(facts_present(prompt, ImageReading(seen, "grass")))
    assert sorted(name for name, there in facts if there) == sorted(present.split())
    asked = sum(value is not None for thing in prompt.objects for value in thing)
    assert len(facts) == asked + (prompt.background is not None)


class Oracle(AttributeReader):
    """A reader whose logits are the dense labels of known scenes, for any image."""

    labels: torch.Tensor

    def forward(self, pixels: torch.Tensor) -> dict[str, torch.Tensor]:
        labels = self.labels[: len(pixels)]
        return {
            name: 10.0 * torch.nn.functional.one_hot(labels[..., index], classes).float()
            for index, (name, classes) in enumerate(PATCH_CLASSES.items())
        }


def test_dense_labels_give_back_every_fact_of_a_scene() -> None:
    scenes = [sample_scene(seed, profile=IMAGE_TOKENS) for seed in range(40)]
    oracle = Oracle(build_reader("tiny").config)
    labels = np.stack([patch_labels(scene, READER_PATCH, IMAGE_SIZE) for scene in scenes])
    oracle.labels = torch.from_numpy(labels)
    images = (image_pixels(scenes, IMAGE_SIZE) + 1) / 2
    scores = attribute_scores(AttributeJudge(oracle), images, [caption(scene) for scene in scenes])
    assert scores.share == scores.exact == scores.count == 1.0
    assert set(scores.by_attribute) == {"size", "colour", "pattern", "shape", "background"}
    wrong = attribute_scores(
        AttributeJudge(oracle), images, [caption(scene) for scene in scenes[1:] + scenes[:1]]
    )
    assert 0.1 < wrong.share < 0.6
