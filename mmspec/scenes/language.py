"""Words for scenes: short captions, long descriptions, and the reader that checks them.

Deterministic given the scene, so that a sentence is right or wrong. All text is lower case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from mmspec.scenes.world import (
    BACKGROUNDS,
    COLOURS,
    MAX_OBJECTS,
    PATTERNS,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    pairs,
)

__all__ = ["CaptionReading", "caption", "describe", "name", "parse_caption", "vertical_relation"]

NUMBERS = ("zero", "one", "two", "three")
ORDINALS = ("first", "second", "third")
_NAME = rf"a ({'|'.join(SIZES)}) ({'|'.join(COLOURS)}) ({'|'.join(PATTERNS)}) ({'|'.join(SHAPES)})"
_CAPTION = re.compile(rf"{_NAME}(?: left of {_NAME}){{0,{MAX_OBJECTS - 1}}} on ({'|'.join(BACKGROUNDS)})\.")


@dataclass(frozen=True, slots=True)
class CaptionReading:
    """Facts of a caption: the attributes of each object, from left to right, and the background."""

    objects: tuple[tuple[str, str, str, str], ...]
    background: str


def name(thing: SceneObject) -> str:
    """Name an object in words, without article: `small red striped circle`."""
    return " ".join(thing.attributes)


def vertical_relation(one: SceneObject, other: SceneObject) -> str:
    """Vertical relation of `one` to `other`: `above`, `below` or `level with`."""
    if one.row == other.row:
        return "level with"
    return "above" if one.y < other.y else "below"


def caption(scene: Scene) -> str:
    """One sentence with every object from left to right, and the background."""
    return " left of ".join(f"a {name(thing)}" for thing in scene.objects) + f" on {scene.background}."


def parse_caption(text: str) -> CaptionReading | None:
    """Read a caption back; None where it does not follow the grammar."""
    text = text.strip()
    if _CAPTION.fullmatch(text) is None:
        return None
    found = re.findall(_NAME, text)
    return CaptionReading(tuple(found), text.rsplit(" ", 1)[1][:-1])


def describe(scene: Scene) -> str:
    """A description of over 100 tokens: each object, its attributes and place, and every pair of objects."""
    count = len(scene.objects)
    sentences = [
        f"this is a picture of {NUMBERS[count]} {'object' if count == 1 else 'objects'} on a background of "
        f"{scene.background}.",
        "the objects are named from left to right.",
    ]
    for ordinal, thing in zip(ORDINALS, scene.objects, strict=False):
        sentences += [
            f"the {ordinal} object from the left is a {name(thing)}.",
            f"it is in the {thing.row} {thing.column} part of the picture.",
            f"its size is {thing.size}, its colour is {thing.colour}, its pattern is {thing.pattern} and "
            f"its shape is {thing.shape}.",
        ]
    if count == 1:
        sentences.append(
            "there is nothing left of it, nothing right of it, nothing above it and nothing below it."
        )
    sentences += [
        f"the {name(left)} is left of the {name(right)} and {vertical_relation(left, right)} it."
        for left, right in pairs(scene)
    ]
    sentences.append(
        f"nothing else is in the picture, and the texture of {scene.background} fills the rest of it from "
        "corner to corner."
    )
    return " ".join(sentences)
