"""Scenes: objects on a background, and how they are sampled.

Knows shapes, colours and places; knows nothing of pixels or words. All lengths are in pixels of a canvas of
96 x 96.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import combinations

import numpy as np

from mmspec.errors import InputError

__all__ = [
    "BACKGROUNDS",
    "CANVAS",
    "COLOURS",
    "COLUMNS",
    "GENERAL",
    "HELD_OUT_SEEDS",
    "IMAGE_TOKENS",
    "MAX_OBJECTS",
    "PATTERNS",
    "ROWS",
    "SHAPES",
    "SIZES",
    "Scene",
    "SceneObject",
    "SceneProfile",
    "overlaps",
    "sample_scene",
    "training_seeds",
]

CANVAS = 96
MAX_OBJECTS = 3
SHAPES = ("circle", "square", "triangle", "star", "cross", "ring")
COLOURS = ("red", "orange", "yellow", "green", "blue", "purple", "white", "black")
SIZES = ("small", "large")
PATTERNS = ("plain", "striped", "dotted")
BACKGROUNDS = ("grass", "sand", "water", "stone", "wood", "brick")
ROWS = ("top", "middle", "bottom")
COLUMNS = ("left", "centre", "right")

HELD_OUT_SEEDS = range(1_000_000)
"""Seeds that training never draws: every figure that is reported comes from them."""

# Gaps between the bands keep every place word a matter of fact, never of a pixel's rounding.
BANDS = ((22, 30), (43, 53), (66, 74))
ROTATIONS = np.linspace(-0.12, 0.12, 13)


@dataclass(frozen=True, slots=True)
class SceneProfile:
    """Distribution that scenes are sampled from.

    Attributes:
        diameters: smallest and largest diameter of each of `SIZES`, both included.
        counts: probability of one object, of two, and so on.
        min_step: between the centres of neighbours in reading order, so that the order can be seen.
        pattern_scale: how many times coarser stripes and dots are.
    """

    diameters: tuple[tuple[int, int], tuple[int, int]]
    counts: tuple[float, ...]
    min_step: int = 8
    pattern_scale: float = 1.0


GENERAL = SceneProfile(diameters=((20, 24), (32, 38)), counts=(0.2, 0.35, 0.45))
"""For models that look at images."""

IMAGE_TOKENS = SceneProfile(diameters=((26, 28), (38, 42)), counts=(0.4, 0.6), min_step=32, pattern_scale=1.5)
"""For models that draw: every object and its pattern span several image tokens (4 pixels of 64)."""


@dataclass(frozen=True, slots=True)
class SceneObject:
    """One thing in a scene; centre `x`, `y` and `diameter` in pixels of the canvas, `rotation` in radians.

    `pattern_scale` is how many times coarser than usual the stripes or dots are.
    """

    shape: str
    colour: str
    size: str
    pattern: str
    x: float
    y: float
    diameter: int
    rotation: float = 0.0
    pattern_scale: float = field(default=1.0, repr=False)

    @property
    def attributes(self) -> tuple[str, str, str, str]:
        """Size, colour, pattern and shape, in the order in which they are said."""
        return self.size, self.colour, self.pattern, self.shape

    @property
    def row(self) -> str:
        """The band from top to bottom that the centre is in, one of `ROWS`."""
        return ROWS[_band(self.y)]

    @property
    def column(self) -> str:
        """The band from left to right that the centre is in, one of `COLUMNS`."""
        return COLUMNS[_band(self.x)]


@dataclass(frozen=True, slots=True)
class Scene:
    """Objects from left to right on a background; `seed` fixes texture and noise."""

    objects: tuple[SceneObject, ...]
    background: str
    seed: int

    @property
    def class_label(self) -> int:
        """Colour and shape of the leftmost object as one number below 48."""
        first = self.objects[0]
        return COLOURS.index(first.colour) * len(SHAPES) + SHAPES.index(first.shape)


def sample_scene(seed: int, *, objects: int | None = None, profile: SceneProfile = GENERAL) -> Scene:
    """Sample a scene; equal arguments give equal scenes.

    Args:
        seed: any non-negative integer; `HELD_OUT_SEEDS` are never used in training.
        objects: how many objects (1 to 3, or as many as the profile has); None draws the number too.
        profile: sizes and numbers of objects.
    """
    if seed < 0:
        raise InputError("seed", seed, "a non-negative integer")
    most = len(profile.counts)
    if objects is not None and not 1 <= objects <= most:
        raise InputError("objects", objects, f"1 to {most}, or None for a random number")
    rng = np.random.default_rng([seed, 0x5CE7E])
    count = objects or 1 + int(rng.choice(most, p=profile.counts))
    drawn = [_sample_object(rng, profile) for _ in range(count)]
    placed: tuple[SceneObject, ...] | None = None
    while placed is None:
        placed = _place(drawn, rng, profile)
    return Scene(placed, BACKGROUNDS[rng.integers(len(BACKGROUNDS))], seed)


def training_seeds(seed: int, stage: int, step: int, process: int, count: int) -> np.ndarray:
    """Seeds of one batch of a training: never a held-out one, and all but surely never seen before."""
    rng = np.random.default_rng([seed, stage, step, process])
    return rng.integers(HELD_OUT_SEEDS.stop, 2**62, size=count)


def overlaps(one: SceneObject, other: SceneObject) -> bool:
    """True if the bounding boxes of two objects touch, with the margin that rotation needs."""
    reach = 0.55 * (one.diameter + other.diameter) + 1
    return abs(one.x - other.x) < reach and abs(one.y - other.y) < reach


def pairs(scene: Scene) -> Iterator[tuple[SceneObject, SceneObject]]:
    """Every pair of objects, the left one first."""
    return combinations(scene.objects, 2)


def _sample_object(rng: np.random.Generator, profile: SceneProfile) -> SceneObject:
    """Sample an object that has no place yet."""
    shape, colour, size, pattern, rotation = rng.integers(
        (len(SHAPES), len(COLOURS), len(SIZES), len(PATTERNS), len(ROTATIONS))
    )
    smallest, largest = profile.diameters[size]
    diameter = int(rng.integers(smallest, largest + 1))
    attributes = SHAPES[shape], COLOURS[colour], SIZES[size], PATTERNS[pattern]
    return SceneObject(*attributes, 0, 0, diameter, float(ROTATIONS[rotation]), profile.pattern_scale)


def _place(
    drawn: list[SceneObject], rng: np.random.Generator, profile: SceneProfile
) -> tuple[SceneObject, ...] | None:
    """Try to place all objects; None where two overlap or their order could not be seen."""
    placed = []
    for thing in drawn:
        bands = rng.integers(len(BANDS), size=2)
        x, y = (int(rng.integers(BANDS[band][0], BANDS[band][1] + 1)) for band in bands)
        placed.append(replace(thing, x=x, y=y))
    placed.sort(key=lambda thing: thing.x)
    for left, right in combinations(placed, 2):
        if right.x - left.x < profile.min_step or overlaps(left, right):
            return None
    return tuple(placed)


def _band(position: float) -> int:
    return sum(position > (BANDS[i][1] + BANDS[i + 1][0]) / 2 for i in range(len(BANDS) - 1))
