"""Text for scenes: captions, descriptions, and questions with unique answers.

The text is deterministic given the scene, so that a sentence is right or wrong. All text is lower case.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np

from mmspec.errors import InputError
from mmspec.registry import require_known
from mmspec.scenes.world import (
    COLOURS,
    SHAPES,
    SIZES,
    Scene,
    SceneObject,
    pairs,
)

__all__ = [
    "CAPTION_PROMPTS",
    "DESCRIPTION_PROMPTS",
    "KINDS",
    "STORY_PROMPTS",
    "Question",
    "ask",
    "caption",
    "describe",
    "questions",
]

NUMBERS = ("zero", "one", "two", "three")
ORDINALS = ("first", "second", "third")


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


CAPTION_PROMPTS = (
    "describe the picture.",
    "describe this image.",
    "describe the picture in one sentence.",
    "caption the picture.",
    "caption this image.",
    "what is in the picture?",
    "what is in this image?",
    "what do you see?",
)
DESCRIPTION_PROMPTS = (
    "describe the picture in detail.",
    "describe this image in detail.",
    "describe the image in detail.",
    "describe everything in the picture.",
    "write a long description of the picture.",
    "write a detailed description of this image.",
)
STORY_PROMPTS = (
    "Tell a story about it.",
    "Tell a short story for children about it.",
    "Write a letter to a friend about it.",
    "Write a diary entry about the day when you saw this.",
    "Describe it to a child.",
    "What could happen next?",
)
PLURALS = {shape: shape + ("es" if shape.endswith("s") else "s") for shape in SHAPES}
MAX_QUESTIONS = 16
PLACES = (("",), ("left", "right"), ("left", "middle", "right"))


@dataclass(frozen=True, slots=True)
class Question:
    """A question about one scene, its unique answer, and its kind (one of `KINDS`)."""

    kind: str
    text: str
    answer: str


@dataclass(frozen=True, slots=True)
class _Reference:
    """Words that identify one object, and the attribute that they reveal."""

    text: str
    reveals: str
    thing: SceneObject


def ask(scene: Scene, kind: str, rng: np.random.Generator) -> Question | None:
    """Sample a question of one kind; None if the scene allows none (relations need two objects)."""
    require_known("kind", kind, KINDS)
    asked = _ASKERS[kind](scene, rng)
    return None if asked is None else Question(kind, *asked)


def questions(scene: Scene, rng: np.random.Generator, count: int) -> list[Question]:
    """Sample distinct questions about one scene; kinds are repeated only after all others were used."""
    if not 0 <= count <= MAX_QUESTIONS:
        raise InputError(
            "count", count, f"must be at most {MAX_QUESTIONS}: simple scenes allow few questions"
        )
    asked: dict[str, Question] = {}
    while len(asked) < count:
        for kind in rng.permutation(KINDS):
            question = ask(scene, str(kind), rng)
            if question is not None:
                asked.setdefault(question.text, question)
    return list(asked.values())[:count]


def _references(scene: Scene, index: int, hidden: str | None) -> list[_Reference]:
    """List all unambiguous references to an object that do not reveal `hidden`."""
    thing = scene.objects[index]
    others = [other for i, other in enumerate(scene.objects) if i != index]
    place = PLACES[len(others)][index]
    found = [_Reference(f"the {place} object" if place else "the object", "place", thing)]
    for attribute in ("shape", "colour", "size", "pattern"):
        value = getattr(thing, attribute)
        if attribute == hidden or not others or any(getattr(other, attribute) == value for other in others):
            continue
        found.append(
            _Reference(f"the {value}" if attribute == "shape" else f"the {value} object", attribute, thing)
        )
    return found


def _choose(rng: np.random.Generator, options: list[_Reference]) -> _Reference:
    # Prefer shape and colour; half of all questions would refer to places otherwise.
    weights = np.array(
        [{"place": 1.0, "shape": 3.0, "colour": 3.0}.get(option.reveals, 1.0) for option in options]
    )
    return options[int(rng.choice(len(options), p=weights / weights.sum()))]


def _some_reference(scene: Scene, rng: np.random.Generator, hidden: str | None = None) -> _Reference:
    return _choose(rng, _references(scene, int(rng.integers(len(scene.objects))), hidden))


def _ask_colour(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    reference = _some_reference(scene, rng, "colour")
    spelling = "color" if rng.random() < 0.25 else "colour"
    return f"what {spelling} is {reference.text}?", reference.thing.colour


def _ask_attribute(scene: Scene, rng: np.random.Generator, name: str, verb: str = "is") -> tuple[str, str]:
    reference = _some_reference(scene, rng, name)
    return f"what {name} {verb} {reference.text}?", getattr(reference.thing, name)


def _ask_where(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    reference = _some_reference(scene, rng)
    return f"where is {reference.text}?", f"{reference.thing.row} {reference.thing.column}"


def _ask_count(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    attribute = ("any", "size", "shape", "colour")[rng.integers(4)]
    if attribute == "any":
        return "how many objects are there?", NUMBERS[len(scene.objects)]
    values = {"size": SIZES, "shape": SHAPES, "colour": COLOURS}[attribute]
    present = getattr(scene.objects[rng.integers(len(scene.objects))], attribute)
    value = present if rng.random() < 0.6 else values[rng.integers(len(values))]
    count = sum(getattr(thing, attribute) == value for thing in scene.objects)
    words = PLURALS[value] if attribute == "shape" else f"{value} objects"
    return f"how many {words} are there?", NUMBERS[count]


def _ask_exists(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    thing = scene.objects[rng.integers(len(scene.objects))]
    colour, shape = thing.colour, thing.shape
    if rng.random() < 0.5:
        if rng.random() < 0.5:
            colour = COLOURS[rng.integers(len(COLOURS))]
        else:
            shape = SHAPES[rng.integers(len(SHAPES))]
    present = any((other.colour, other.shape) == (colour, shape) for other in scene.objects)
    return f"is there {'an' if colour[0] in 'aeiou' else 'a'} {colour} {shape}?", "yes" if present else "no"


def _two_references(scene: Scene, rng: np.random.Generator) -> tuple[_Reference, _Reference] | None:
    if len(scene.objects) < 2:
        return None
    one, other = (int(index) for index in rng.permutation(len(scene.objects))[:2])
    options = [
        [reference for reference in _references(scene, index, None) if reference.reveals != "place"]
        for index in (one, other)
    ]
    if not all(options):
        return None
    return _choose(rng, options[0]), _choose(rng, options[1])


def _ask_relation(scene: Scene, rng: np.random.Generator, kind: str) -> tuple[str, str] | None:
    chosen = _two_references(scene, rng)
    if chosen is None:
        return None
    one, other = chosen
    if kind == "side":
        return f"is {one.text} left of {other.text}?", "yes" if one.thing.x < other.thing.x else "no"
    text = f"is {one.text} above, below or level with {other.text}?"
    return text, vertical_relation(one.thing, other.thing).split()[0]


def _ask_background(scene: Scene, rng: np.random.Generator) -> tuple[str, str]:
    return "what is the background?", scene.background


_ASKERS: dict[str, Callable[[Scene, np.random.Generator], tuple[str, str] | None]] = {
    "colour": _ask_colour,
    "shape": partial(_ask_attribute, name="shape"),
    "size": partial(_ask_attribute, name="size"),
    "pattern": partial(_ask_attribute, name="pattern", verb="is on"),
    "where": _ask_where,
    "count": _ask_count,
    "exists": _ask_exists,
    "side": partial(_ask_relation, kind="side"),
    "height": partial(_ask_relation, kind="height"),
    "background": _ask_background,
}
KINDS = tuple(_ASKERS)
