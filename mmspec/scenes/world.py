"""Scenes: objects on a background, and how they are sampled.

This module defines shapes, colours and positions, without pixels or text. All lengths are in pixels of a 96 x
96 canvas.
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
"""Seeds that training never uses: all reported figures are measured on them."""

# Gaps between the bands keep position words unambiguous, independent of rounding.
BANDS = ((22, 30), (43, 53), (66, 74))
ROTATIONS = np.linspace(-0.12, 0.12, 13)


@dataclass(frozen=True, slots=True)
class SceneProfile:
    """Distribution of scenes.

    Attributes:
        diameters: smallest and largest diameter of each of `SIZES`, inclusive.
        counts: probability of one object, of two, and so on.
        min_step: least distance of the centres of neighbours in reading order, so that the order is visible.
        pattern_scale: factor of the spacing of stripes and dots.
    """

    diameters: tuple[tuple[int, int], tuple[int, int]]
    counts: tuple[float, ...]
    min_step: int = 8
    pattern_scale: float = 1.0


GENERAL = SceneProfile(diameters=((20, 24), (32, 38)), counts=(0.2, 0.35, 0.45))
"""For models that read images."""

IMAGE_TOKENS = SceneProfile(diameters=((26, 28), (38, 42)), counts=(0.4, 0.6), min_step=32, pattern_scale=1.5)
"""For image generators: every object and its pattern span several image tokens (4 pixels of 64)."""


@dataclass(frozen=True, slots=True)
class SceneObject:
    """Object in a scene; centre `x`, `y` and `diameter` in pixels of the canvas, `rotation` in radians.

    `pattern_scale` is the factor of the spacing of the stripes or dots.
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
        """Size, colour, pattern and shape, in the order of captions."""
        return self.size, self.colour, self.pattern, self.shape

    @property
    def row(self) -> str:
        """Vertical band of the centre, one of `ROWS`."""
        return ROWS[_band(self.y)]

    @property
    def column(self) -> str:
        """Horizontal band of the centre, one of `COLUMNS`."""
        return COLUMNS[_band(self.x)]


@dataclass(frozen=True, slots=True)
class Scene:
    """Objects from left to right on a background; `seed` determines texture and noise."""

    objects: tuple[SceneObject, ...]
    background: str
    seed: int

    @property
    def class_label(self) -> int:
        """Class of the leftmost object's colour and shape, from 0 to 47."""
        first = self.objects[0]
        return COLOURS.index(first.colour) * len(SHAPES) + SHAPES.index(first.shape)


def sample_scene(seed: int, *, objects: int | None = None, profile: SceneProfile = GENERAL) -> Scene:
    """Sample a scene; equal arguments give equal scenes.

    Args:
        seed: any non-negative integer; `HELD_OUT_SEEDS` are never used in training.
        objects: number of objects (1 to 3, or the profile's limit); None samples the number too.
        profile: distribution of sizes and numbers of objects.
    """
    if seed < 0:
        raise InputError("seed", seed, "must be a non-negative integer")
    most = len(profile.counts)
    if objects is not None and not 1 <= objects <= most:
        raise InputError("objects", objects, f"must be from 1 to {most}, or None for a random number")
    rng = np.random.default_rng([seed, 0x5CE7E])
    count = objects or 1 + int(rng.choice(most, p=profile.counts))
    drawn = [_sample_object(rng, profile) for _ in range(count)]
    placed: tuple[SceneObject, ...] | None = None
    while placed is None:
        placed = _place(drawn, rng, profile)
    return Scene(placed, BACKGROUNDS[rng.integers(len(BACKGROUNDS))], seed)


def training_seeds(seed: int, stage: int, step: int, process: int, count: int) -> np.ndarray:
    """Seeds of one training batch: never held-out ones, and almost surely distinct between batches."""
    rng = np.random.default_rng([seed, stage, step, process])
    return rng.integers(HELD_OUT_SEEDS.stop, 2**62, size=count)


def overlaps(one: SceneObject, other: SceneObject) -> bool:
    """True if the bounding boxes of two objects touch, with a margin for rotation."""
    reach = 0.55 * (one.diameter + other.diameter) + 1
    return abs(one.x - other.x) < reach and abs(one.y - other.y) < reach


def pairs(scene: Scene) -> Iterator[tuple[SceneObject, SceneObject]]:
    """Every pair of objects, the left one first."""
    return combinations(scene.objects, 2)


def _sample_object(rng: np.random.Generator, profile: SceneProfile) -> SceneObject:
    """Sample an object without a position."""
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
    """Try to place all objects; None if two overlap or their order would not be visible."""
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
