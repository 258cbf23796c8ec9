"""Labels of the objects that words of a question mean, as patches have labels for the vision tower.

To answer "what colour is the star?" a decoder has to find the star first, and then its colour. The answer
alone teaches the first step slowly, since nothing rewards it without the second; a label at the word "star"
does so within minutes (answers right on held-out scenes: 71 % before these labels, 77 % fifty steps later).
"""

from __future__ import annotations

import re

from mmspec.scenes import (
    COLOURS,
    COLUMNS,
    MAX_OBJECTS,
    PATTERNS,
    ROWS,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
)
from mmspec.scenes.questions import PLACES, PLURALS

__all__ = ["ATTRIBUTES", "IGNORED", "MENTION_CLASSES", "attribute_labels", "mentions"]

ATTRIBUTES = {"shape": SHAPES, "colour": COLOURS, "size": SIZES, "pattern": PATTERNS}
MENTION_CLASSES = {
    **{name: len(values) for name, values in ATTRIBUTES.items()},
    "row": len(ROWS),
    "column": len(COLUMNS),
    "rank": MAX_OBJECTS,
    "count": 1 + MAX_OBJECTS,
}
"""Number of classes of each label of a mention; all but the count only where it means exactly one object."""

IGNORED = -100
_SHAPE, _COLOUR, _PLURAL = ("|".join(words) for words in (SHAPES, COLOURS, PLURALS.values()))
_MENTION = re.compile(
    rf"the (?:\w+ )?object\b|the (?:{_SHAPE})\b|an? (?:{_COLOUR}) (?:{_SHAPE})\b"
    rf"|\w+ objects\b|(?:{_PLURAL})\b"
)
_SINGULAR = {plural: shape for shape, plural in PLURALS.items()}
_TOKEN = re.compile(r"[a-z]+|[^a-z\s]")


def mentions(scene: Scene, text: str) -> list[tuple[int, list[int]]]:
    """The mentions of objects in a question.

    Returns:
        For each the index of its last token in the text, and its labels, one for each of `MENTION_CLASSES`.
    """
    found = []
    for match in _MENTION.finditer(text):
        meant = _meant(scene, match.group())
        last = len(_TOKEN.findall(text[: match.end()])) - 1
        found.append((last, _labels(scene, meant)))
    return found


def _meant(scene: Scene, phrase: str) -> list[int]:
    words = {_SINGULAR.get(word, word) for word in phrase.split()}
    places = PLACES[len(scene.objects) - 1]
    wanted = words & {*SHAPES, *COLOURS, *SIZES, *PATTERNS}
    return [
        index
        for index, thing in enumerate(scene.objects)
        if wanted <= set(thing.attributes) and (places[index] in words or not words & set(places))
    ]


def _labels(scene: Scene, meant: list[int]) -> list[int]:
    attributes = [IGNORED] * (len(MENTION_CLASSES) - 1)
    if len(meant) == 1:
        thing = scene.objects[meant[0]]
        place = ROWS.index(thing.row), COLUMNS.index(thing.column)
        attributes = [*attribute_labels(thing), *place, meant[0]]
    return [*attributes, len(meant)]


def attribute_labels(thing: SceneObject) -> list[int]:
    """The index of each of an object's `ATTRIBUTES`."""
    return [values.index(getattr(thing, name)) for name, values in ATTRIBUTES.items()]
