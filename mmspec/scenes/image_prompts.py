"""Image prompts for a scene or for some of its attributes, and their parser.

"a red ring left of a small blue square", "an image of a large star on sand": the shape is always given, the
other attributes are optional. All text is lower case.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import numpy as np

from mmspec.scenes.language import caption
from mmspec.scenes.world import BACKGROUNDS, COLOURS, PATTERNS, SHAPES, SIZES, Scene

__all__ = ["ImagePrompt", "parse_image_prompt", "sample_image_prompt"]

FULL = 0.6  # share of prompts that are captions
SAID = 0.6  # probability of size, colour, pattern and background in other prompts
RELATIONS = ("left of", "right of", "and")
RELATION_PROBABILITIES = (0.6, 0.2, 0.2)
OPENINGS = ("", "", "", "a picture of ", "an image of ", "a photo of ", "show me ")
VALUES = (SIZES, COLOURS, PATTERNS, SHAPES)
_RELATION = re.compile(r"\b(?:to the )?(left of|right of)\b|\b(and)\b")


@dataclass(frozen=True, slots=True)
class ImagePrompt:
    """Image prompt with its parsed attributes.

    Attributes:
        text: the prompt.
        objects: size, colour, pattern and shape of each object, None where not given; from left to right.
        background: or None.
        ordered: True if the prompt determines which object is on the left.
    """

    text: str
    objects: tuple[tuple[str | None, ...], ...]
    background: str | None
    ordered: bool = True


def sample_image_prompt(scene: Scene, rng: np.random.Generator) -> ImagePrompt:
    """Sample a prompt that describes this scene fully or in part."""
    if rng.random() < FULL:
        text = caption(scene)
        objects = tuple(thing.attributes for thing in scene.objects)
        return ImagePrompt(text[:-1] if rng.random() < 0.3 else text, objects, scene.background)
    kept = [
        tuple(value if value in SHAPES or rng.random() < SAID else None for value in thing.attributes)
        for thing in scene.objects
    ]
    relation = str(rng.choice(RELATIONS, p=RELATION_PROBABILITIES))
    swapped = len(kept) > 1 and (relation == "right of" or (relation == "and" and rng.random() < 0.5))
    names = [_name(thing) for thing in kept]
    text = str(rng.choice(OPENINGS)) + f" {relation} ".join(names[::-1] if swapped else names)
    background = scene.background if rng.random() < SAID else None
    text += "" if background is None else f" on {background}"
    text += "." if rng.random() < 0.5 else ""
    return ImagePrompt(text, tuple(kept), background, relation != "and" or len(kept) < 2)


def parse_image_prompt(text: str) -> ImagePrompt | None:
    """Parse an image prompt word by word; None if it names no object.

    Unknown words are ignored, as is everything after a second relation that contradicts the first.
    """
    parts = _RELATION.split(text.lower())
    relations = [one or other for one, other in zip(parts[1::3], parts[2::3], strict=True)]
    objects, background = [], None
    for phrase in parts[0::3]:
        words = re.findall(r"[a-z]+", phrase)
        found = tuple(next((word for word in words if word in values), None) for values in VALUES)
        if found[-1] is not None:
            objects.append(found)
        background = next((word for word in words if word in BACKGROUNDS), background)
    if not objects:
        return None
    if "right of" in relations:
        objects.reverse()
    return ImagePrompt(text, tuple(objects), background, "and" not in relations or len(objects) < 2)


def _name(thing: tuple[str | None, ...]) -> str:
    words = [word for word in thing if word is not None]
    return f"{'an' if words[0][0] in 'aeiou' else 'a'} {' '.join(words)}"
